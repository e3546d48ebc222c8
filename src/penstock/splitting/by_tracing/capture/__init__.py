"""From a model to one graph, with `torch.export`."""
