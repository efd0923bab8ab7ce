"""`bench overlap`: step times on slow networks: compute alone, DDP at its best, and the engine."""
