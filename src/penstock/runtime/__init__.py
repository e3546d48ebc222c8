"""Running a lowered schedule: stages, microbatches, backward, transports and the executor."""
