"""`bench recorder`: the cost of recording a trace."""
