"""Tuning: measure a running job, plan for it, and plan again when it drifts."""
