"""Differentially private PyTorch training that uses the low-dimensional span of gradients."""

from dpspan.accounting import Budget as Budget
from dpspan.accounting import calibrate as calibrate
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
from dpspan.per_sample import per_sample_gradients as per_sample_gradients
from dpspan.sampling import BatchMemoryManager as BatchMemoryManager
from dpspan.sampling import PrivateLoader as PrivateLoader
from dpspan.validation import fix as fix
from dpspan.validation import validate as validate

__version__ = "0.1.0"
