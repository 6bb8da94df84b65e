"""Kernel fingerprints: what every op signature of a model gives on inputs that are the same on every machine."""
