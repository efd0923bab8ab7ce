"""`bench convergence`: loss with a codec beside dense loss."""
