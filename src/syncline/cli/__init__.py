"""The command line: `main.py` dispatches, one file a verb."""
