"""Splitting by a list of layers: the model's own code runs on every stage, nothing is traced."""
