"""Record a program step by step: every step is a part of the trace that can be taken while the program goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hashbench.core.records import Trace
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.segments import TraceSegment, TraceSegments
from hashbench.core.trace.steps import StepClock
from hashbench.core.trace.tracer import choose


class SteppedTrace(HashDebugTrace):
    """Trace that is taken part by part, while it is recorded; it can be started and stopped once.

    Args:
        after_step: called with the optimizer after each of its steps, from :meth:`follow` until :meth:`unfollow`. It
            may start and stop the trace.
        tracer: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        each: count the steps of each optimizer; see :mod:`~hashbench.core.trace.steps`.
        options: all others of it, but for ``model``.
    """

    def __init__(
        self,
        *,
        after_step: Callable[[torch.optim.Optimizer], None],
        tracer: str = "auto",
        each: bool = False,
        **options: Any,
    ) -> None:
        choice = choose(tracer, into_subclasses=True)
        super().__init__(tracer=choice.tracer, **options)
        self._choice = choice
        self._segments: TraceSegments | None = None
        self._tracer.raw.after_step = after_step
        self._tracer.raw.modules.clock = StepClock(each=each)

    @property
    def head(self) -> Trace:
        """Empty trace with the tracer of this one."""
        return Trace((), tracer=self.tracer, tracer_reason=self.tracer_reason)

    def follow(self) -> None:
        """Count the steps of optimizers from now on."""
        self._tracer.raw.modules.keep_counting(self._tracer.raw)

    def unfollow(self) -> None:
        """Stop counting steps."""
        self._tracer.raw.modules.stop_counting()

    def start(self, model: torch.nn.Module | None = None) -> None:
        """Record every op from now on, with these names of modules and parameters.

        Raises:
            HashbenchError: another trace is active.
        """
        if model is not None:
            self._tracer.raw.register_model(model)
        self.__enter__()
        self._segments = self._tracer.segments()

    def stop(self) -> None:
        """Stop recording, without waiting for collectives under way: their outputs stay ``pending``."""
        self.__exit__(_Stopped, None, None)

    def add_results(self, named: Iterable[tuple[str, Any]], *, wait: bool = True) -> None:
        """Add results of this step by name, hashed now: tensors, or plain Python values.

        Without ``wait``, the digest of a tensor that a collective still writes is ``pending``.
        """
        self._tracer.raw.add_results(named, wait=wait)

    def names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return the path of each parameter in the modules that the trace knows; ``""`` for others."""
        raw = self._tracer.raw
        with torch._C.DisableTorchFunction():
            return [raw.state_name(raw.nodes.state_of(parameter))[1] for parameter in parameters]

    def roots(self) -> dict[str, torch.nn.Module]:
        """Return the living modules that were called outside of any other, by their names in the trace."""
        return self._tracer.raw.modules.roots()

    @property
    def records(self) -> int:
        """Number of records so far."""
        return self._tracer.raw.nodes.record_count()

    def settle(self) -> None:
        """Hash the outputs of collectives that are done."""
        self._tracer.raw.settle()

    def taken(self) -> TraceSegment:
        """Return what is new since the last call. Synchronizes devices."""
        assert self._segments is not None
        with untraced():  # the program is being recorded, and digests are fetched from devices
            return self._tracer.taken(self._segments)


class _Stopped(Exception):  # noqa: N818 – never raised
    """Reason for a trace to end as after an exception: without waiting."""
