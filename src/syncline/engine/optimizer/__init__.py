"""The optimizer's side of the engine: `step()` returns at once and runs by parts."""
