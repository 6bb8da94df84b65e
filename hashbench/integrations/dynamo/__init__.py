"""PyTorch's own harness, ``benchmarks/dynamo``, run unedited with hashbench's trace around its two eager runs.

How one run travels: ``harness`` reads the harness's source and says what is missing before anything starts. Then it
starts the harness with the folder ``site`` on ``PYTHONPATH``, so that it and every child that it starts again load
``hook``. That waits for the module with ``class BenchmarkRunner`` and wraps ``check_accuracy``. While one runs,
``model_check`` counts the resets of the random state, traces the two eager runs and listens to their comparison; when
the harness has written its own row, it looks for the cause and writes ours. ``session`` puts ours beside theirs.

Nothing of the harness is copied here. Its words (``run_n_iterations``, ``reset_rng_state``, ``same``) are its
interface.
"""
