"""What processes of tests start with: imported once, by the server that they are forked from.

Whatever a process imports by itself is paid for by every rank of every world: torch's optimizers
import its compiler, and NumPy's sets its masked arrays. Modules live as long as the process, so
that no garbage collection in it needs to look at what they hold.
"""

import gc

import numpy.ma
import pytest
import torch._dynamo
import torch.distributed.fsdp

import penstock.checkpoint.checkpoints
import penstock.dropin.schedules
import penstock.elastic
import penstock.measuring
import penstock.splitting.splitter
import penstock.training.pipeline

__all__ = ["LOADED"]

LOADED = (numpy, pytest, torch, penstock)

gc.collect()
gc.freeze()
