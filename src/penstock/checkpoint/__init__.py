"""Checkpoints: saved by any layout in the background, loaded by any other."""
