"""Differentially private PyTorch training that uses the low-dimensional span of gradients.

The public names are in `__init__.pyi`, and are imported when they are used: a command that needs
no torch does not wait for it.
"""

import sys

import lazy_loader

from dpspan.support.moved import MovedModules

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.2.0"

sys.meta_path.append(MovedModules())
