"""Values in flight: their tickets, their one owner (`in_flight.py`), and the touches that wait for them."""
