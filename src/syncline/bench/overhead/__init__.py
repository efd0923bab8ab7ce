"""`bench overhead`: host time and memory of an attached model against DDP."""
