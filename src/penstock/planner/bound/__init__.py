"""Lower bounds: what no order can beat."""
