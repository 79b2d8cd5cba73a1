"""Private training by the frameworks that people use: each module needs its framework installed."""
