"""The results file: its schema and its statistics."""
