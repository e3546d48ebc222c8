"""From a model to one graph, by `torch.export`."""
