"""One file per method: what one step releases."""

from dpspan.mechanisms.base import Mechanism as Mechanism
from dpspan.mechanisms.base import Method as Method
from dpspan.mechanisms.dpsgd import DPSGD as DPSGD
