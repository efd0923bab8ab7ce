"""Values in flight: their tickets, their one owner (`tracker.py`), and the touches that wait for them."""
