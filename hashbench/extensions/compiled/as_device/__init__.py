"""Inductor's Triton code for a device that is not there: made with mocked properties, run in Triton's interpreter on
CPU tensors."""
