"""Cuts, placement, checkpoints and microbatches: what `plan` and `search` choose from."""
