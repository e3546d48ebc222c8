"""What `torch.distributed.pipelining._utils` has: metadata, trees, and who holds which stage."""

from penstock.dropin.names.lists import *
from penstock.dropin.stages.kinds import *
from penstock.dropin.stages.metadata import *
from penstock.dropin.stages.values import *
