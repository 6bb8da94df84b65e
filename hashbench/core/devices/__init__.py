"""Digests computed on the tensor's own device, asynchronously; see ``docs/devices.md``."""
