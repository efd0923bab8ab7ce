"""Recording: measuring spans on each rank while it trains, and gathering them on rank 0."""
