"""From rows to files and back, and from two sweeps to what changed. Nothing here imports torch."""
