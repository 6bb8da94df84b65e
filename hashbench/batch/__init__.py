"""Batch invariance: whether an item's result depends on what else is in its batch, and which kernel made it so."""
