"""Rerun models that pass under perturbations, and name the kernel of a difference that only these show."""
