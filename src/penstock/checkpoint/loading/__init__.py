"""Loading: check everything, read into memory beside the model, and change all of it at once."""

__all__: list[str] = []
