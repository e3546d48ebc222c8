"""From an order and a byte limit to what is recomputed, offloaded or kept."""
