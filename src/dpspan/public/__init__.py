"""Public data: what is declared public, its gradients, warm starts, and layers learnt from it."""
