"""`bench convergence`: loss and accuracy with every codec beside dense training."""
