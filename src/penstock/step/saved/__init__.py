"""What forwards save for their backwards: recomputed later, or on the host meanwhile."""
