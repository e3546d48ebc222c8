"""Cutting a chain of pieces into stages."""
