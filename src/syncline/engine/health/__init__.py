"""Health: lost and stuck peers, errors with a rank's name, replicas that differ."""
