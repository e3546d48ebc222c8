"""Measured costs: seconds and bytes of stages and layers, seconds of links."""
