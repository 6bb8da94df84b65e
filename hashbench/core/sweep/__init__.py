"""Many models: which run, when, where, and what becomes of those that never answer."""

from __future__ import annotations

from hashbench.core.extensions import executor_names

LOCAL = "local"

EXECUTORS = (LOCAL, *executor_names())
"""The words after ``--executor``: worker processes of this machine, or what an extension makes. That is called with the
models and their options, with ``jobs`` (``None``: as many as it can run), ``preload`` (what its workers import or call)
and ``cluster``, and returns the executor, connected."""
