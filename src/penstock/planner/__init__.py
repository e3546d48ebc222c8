"""Decide how a model is cut: exact answers from costs alone, without torch."""
