"""Tables of one sweep, and what changed between two. Nothing here imports torch."""
