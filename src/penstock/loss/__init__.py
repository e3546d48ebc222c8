"""What counts as a loss, and how the losses of microbatches add up to that of the batch."""
