"""The optimizer's side: `step()` returns at once and parameters are updated part by part as gradients arrive."""
