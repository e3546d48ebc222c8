"""One run of a model on an example, to see which layers depend on which values."""
