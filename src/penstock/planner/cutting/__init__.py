"""Cutting a chain of pieces into stages: what `partition` is made of."""
