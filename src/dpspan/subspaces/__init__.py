"""Where gradients live: principal directions, the residual beside them, and their sources."""
