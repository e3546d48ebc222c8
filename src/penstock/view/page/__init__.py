"""One HTML page per comparison: what Python puts in, and the scripts that draw it."""
