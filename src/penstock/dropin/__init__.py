"""The names and module paths of `torch.distributed.pipelining`, on top of Penstock."""
