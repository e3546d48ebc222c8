"""What a loss must be, and how the losses of microbatches add up to that of the batch."""
