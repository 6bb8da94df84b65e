"""PyTorch's own harness, ``benchmarks/dynamo``, run unedited with hashbench's trace around its two eager runs.

``harness`` checks its source and starts it with the folder ``site`` on ``PYTHONPATH``, so that each of its processes
loads ``hook``, which wraps ``check_accuracy``. ``model_check`` watches one such call and writes our row; ``session``
puts ours beside theirs. Nothing of the harness is copied: its function names are its interface.
"""
