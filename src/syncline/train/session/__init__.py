"""A session: the runs of one `train` or `compare` command, started, watched and collected."""
