"""Tracing: each dispatched op becomes one record, and a run becomes a :class:`~hashbench.records.Trace`."""
