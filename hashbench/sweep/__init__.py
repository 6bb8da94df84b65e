"""Many models: which run, when, where, and what becomes of those that never answer."""
