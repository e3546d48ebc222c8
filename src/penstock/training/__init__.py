"""The objects that a training script holds."""
