"""Golden copies of every output that a user reads. ``python -m tests.golden`` writes them anew."""
