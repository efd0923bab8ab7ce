"""The reference training loop with its strategies, models, data, checkpoints and sessions."""
