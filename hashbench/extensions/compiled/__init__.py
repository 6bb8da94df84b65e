"""Compiled models: which stage of the compiler, and which kernel, computes something else than eager mode does."""
