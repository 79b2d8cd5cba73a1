"""One file per method: what one step releases."""

from dpspan.mechanisms.base import Mechanism as Mechanism
from dpspan.mechanisms.base import Method as Method
from dpspan.mechanisms.base import Setting as Setting
from dpspan.mechanisms.dpsgd import DPSGD as DPSGD
from dpspan.mechanisms.gep import GEP as GEP
from dpspan.mechanisms.gep import BiasedGEP as BiasedGEP
from dpspan.mechanisms.mirror import MirrorDescent as MirrorDescent
from dpspan.mechanisms.pdpsgd import PDPSGD as PDPSGD
from dpspan.mechanisms.rgp import RGP as RGP
