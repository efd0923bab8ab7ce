"""One rank of a run: joining the others, the training loop, and the record at the end."""
