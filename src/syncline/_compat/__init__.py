"""Private, untyped or version-dependent torch API, all of it, so that a torch release is one folder to read."""
