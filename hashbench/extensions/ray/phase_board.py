"""What models are doing on the machines of a cluster: a board to which those machines write, and which a sweep reads.

The board is an actor of Ray, which ends with the sweep that made it, also where that is killed. Nothing waits for it:
where it is lost, or slow, nobody knows what the models are doing, and all else goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

WRITE_SECONDS = 1.0
"""How often a machine looks whether there is something new to write."""


class PhaseBoard:
    """The actor: the phase of each task by its key."""

    def __init__(self) -> None:
        self._phases: dict[str, str] = {}

    def write(self, key: str, phase: str) -> None:
        """Note what the task of this key is doing."""
        self._phases[key] = phase

    def read(self) -> dict[str, str]:
        """Return the phases of all tasks that sent any."""
        return dict(self._phases)


class BoardOfSweep:
    """The sweep's side: makes the board, and reads it without waiting. ``ray`` is the module, connected."""

    def __init__(self, ray: Any) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray = ray
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        self.handle = ray.remote(PhaseBoard).options(num_cpus=0, scheduling_strategy=here).remote()
        self._answer: Any = None
        self._phases: Mapping[str, str] = {}

    def read(self) -> Mapping[str, str]:
        """Return what the board has answered since the last call, by task key, and request the next answer."""
        if self.handle is None:
            return {}
        try:
            if self._answer is not None:
                if not self._ray.wait([self._answer], timeout=0)[0]:
                    return self._phases
                self._phases = self._ray.get(self._answer)
            self._answer = self.handle.read.remote()
        except self._ray.exceptions.RayError:
            self.handle = None
        return self._phases


@contextlib.contextmanager
def reporting_phases(phase: Callable[[], str], tell: Callable[[str], object]) -> Iterator[None]:
    """Call ``tell`` from a thread whenever the result of ``phase`` changes, until the end of the context."""
    ended = threading.Event()

    def watch() -> None:
        known = ""
        while not ended.wait(WRITE_SECONDS):
            if (now := phase()) != known:
                known = now
                tell(now)

    thread = threading.Thread(target=watch, name="hashbench phases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
