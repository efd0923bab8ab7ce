"""`bench recorder`: the cost of recording."""
