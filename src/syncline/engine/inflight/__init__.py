"""Values in flight: who waits for a parameter, a gradient or a buffer, and how."""
