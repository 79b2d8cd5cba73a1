"""How tests start processes of their own.

Forked where that is safe, since the imports are done there. DPSPAN_START_METHOD=spawn starts them,
and DataLoaders' workers, as macOS and Windows do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

CHOSEN = os.environ.get("DPSPAN_START_METHOD")
CONTEXT = multiprocessing.get_context(CHOSEN or ("fork" if sys.platform == "linux" else "spawn"))
