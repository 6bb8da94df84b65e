"""Tracing: one dispatched call becomes one record, and a run becomes a :class:`~hashbench.records.Trace`."""
