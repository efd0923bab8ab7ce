"""The reference loop, baseline strategies, models, data, the run folder, and sessions that tie them together."""
