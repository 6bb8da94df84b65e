"""Digests that are made where the tensor lives, without waiting for the device; ``docs/devices.md`` tells how."""
