"""A time budget for experiments."""

from __future__ import annotations

from time import monotonic


class Budget:
    """So many seconds from now. Holds its own reference to the clock, which an experiment on clocks leaves alone."""

    def __init__(self, seconds: float) -> None:
        self._ends = monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; below 0 when it is overdrawn."""
        return self._ends - monotonic()
