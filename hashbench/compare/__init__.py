"""Compare two runs record by record. Pure: no torch, no files."""
