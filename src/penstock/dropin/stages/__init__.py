"""A stage under torch's names, over the stage of the runtime."""
