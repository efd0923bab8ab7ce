"""Recording: what a rank measures while it trains, and how spans of all ranks reach rank 0."""
