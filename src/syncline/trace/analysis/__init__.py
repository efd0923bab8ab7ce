"""Analysis: where a step's time goes, why, and what fixing it would gain."""
