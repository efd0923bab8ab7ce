"""`bench models`: HiPress's table: six models under DDP, other systems and the engine, at several bandwidths."""
