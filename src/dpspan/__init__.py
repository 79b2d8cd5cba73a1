"""Differentially private PyTorch training that uses the low-dimensional span of gradients."""

from dpspan.accounting import Budget as Budget
from dpspan.accounting import calibrate as calibrate
from dpspan.anchors import RandomSubspace as RandomSubspace
from dpspan.capture import Capture as Capture
from dpspan.certificate import write_certificate as write_certificate
from dpspan.clipping import AutomaticClipping as AutomaticClipping
from dpspan.clipping import FlatClipping as FlatClipping
from dpspan.engine import PrivacyEngine as PrivacyEngine
from dpspan.errors import BudgetExceeded as BudgetExceeded
from dpspan.errors import CaptureError as CaptureError
from dpspan.errors import DPSpanError as DPSpanError
from dpspan.errors import UnsupportedModule as UnsupportedModule
from dpspan.gradients import PerSampleGradients as PerSampleGradients
from dpspan.ledger import Ledger as Ledger
from dpspan.mechanisms import DPSGD as DPSGD
from dpspan.mechanisms import GEP as GEP
from dpspan.mechanisms import PDPSGD as PDPSGD
from dpspan.mechanisms import RGP as RGP
from dpspan.mechanisms import BiasedGEP as BiasedGEP
from dpspan.per_sample import per_sample_gradients as per_sample_gradients
from dpspan.public import PublicData as PublicData
from dpspan.public import without_public as without_public
from dpspan.public_gradients import RandomLabels as RandomLabels
from dpspan.public_gradients import RealLabels as RealLabels
from dpspan.sampling import BatchMemoryManager as BatchMemoryManager
from dpspan.sampling import PrivateLoader as PrivateLoader
from dpspan.solvers import Eigh as Eigh
from dpspan.solvers import Lanczos as Lanczos
from dpspan.solvers import PowerIteration as PowerIteration
from dpspan.span import by_stage as by_stage
from dpspan.subspace import Subspace as Subspace
from dpspan.transfer import WarmStart as WarmStart
from dpspan.validation import fix as fix
from dpspan.validation import validate as validate

__version__ = "0.1.0"
