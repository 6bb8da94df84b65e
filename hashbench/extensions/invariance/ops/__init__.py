"""The invariance of torch's ops: what ``hashbench audit --rows`` measures of each."""

DTYPES = ("float32", "bfloat16")
"""That are measured by default."""
