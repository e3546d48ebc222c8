"""What one rank does in one step: the executor, stages, microbatches."""
