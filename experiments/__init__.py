"""Experiments on real data: what the methods gain, beside what simpler things gain."""
