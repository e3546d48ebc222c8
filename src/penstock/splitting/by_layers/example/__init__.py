"""One run of a model on an example, to find which layers depend on which values."""
