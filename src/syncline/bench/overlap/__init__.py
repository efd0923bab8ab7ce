"""`bench overlap`: compute alone, DDP at its best and the engine, in turns."""
