"""Differentially private PyTorch training that uses the low-dimensional span of gradients."""

from dpspan.capture import Capture as Capture
from dpspan.errors import CaptureError as CaptureError
from dpspan.errors import UnsupportedModule as UnsupportedModule
from dpspan.per_sample import per_sample_gradients as per_sample_gradients
from dpspan.validation import fix as fix
from dpspan.validation import validate as validate
