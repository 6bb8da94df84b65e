"""Kernel fingerprints: the outputs of every op signature of a model on inputs that are the same on every machine."""
