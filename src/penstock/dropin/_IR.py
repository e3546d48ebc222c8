"""What `torch.distributed.pipelining._IR` has: pipes of traced models."""  # noqa: N999  # torch's

from penstock.dropin._backward import *
from penstock.dropin._unflatten import *
from penstock.dropin.pipe.graphs import *
from penstock.dropin.pipe.loss import *
from penstock.dropin.pipe.marking import *
from penstock.dropin.pipe.pipe import *
from penstock.dropin.stages.kinds import *
