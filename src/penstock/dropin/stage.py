"""What `torch.distributed.pipelining.stage` has: stages, and what programs take from it."""

from penstock.dropin._backward import *
from penstock.dropin._debug import *
from penstock.dropin.stages.base import *
from penstock.dropin.stages.boundary import *
from penstock.dropin.stages.kinds import *
from penstock.dropin.stages.metadata import *
from penstock.dropin.stages.values import *
