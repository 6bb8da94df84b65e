"""Runs compared: a model, or a plain function, to its row."""
