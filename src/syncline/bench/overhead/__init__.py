"""`bench overhead`: host time and memory of the engine against DDP."""
