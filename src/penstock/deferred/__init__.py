"""The split backward: weight gradients that I defers and W computes."""
