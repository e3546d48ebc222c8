"""One step of a schedule against the unsplit model."""
