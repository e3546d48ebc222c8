"""What `torch.distributed.pipelining.schedules` has: schedules, actions, passes over them."""

from penstock.dropin.classes.base import *
from penstock.dropin.classes.families import *
from penstock.dropin.classes.multi import *
from penstock.dropin.microbatch import *
from penstock.dropin.names.actions import *
from penstock.dropin.names.lists import *
from penstock.dropin.names.passes import *
from penstock.dropin.names.validation import *
from penstock.dropin.orders.slots import *
from penstock.dropin.orders.tables import *
from penstock.dropin.run.step_actions import *
from penstock.dropin.stages.base import *
from penstock.dropin.stages.boundary import *
from penstock.dropin.stages.kinds import *
from penstock.dropin.stages.metadata import *
from penstock.dropin.stages.values import *
