"""A session: the runs of one `train` or `compare` command, from start to results."""
