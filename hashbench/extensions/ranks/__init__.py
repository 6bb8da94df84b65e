"""Programs of several ranks: one trace a rank, written step by step."""
