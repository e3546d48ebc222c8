"""Recorded steps: their costs, and how they compare with what was predicted."""
