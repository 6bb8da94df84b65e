"""Record a program step by step: every step is a part of the trace that can be taken while the program goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hashbench.core.records import Trace
from hashbench.core.trace import native
from hashbench.core.trace.api import refuse_nested
from hashbench.core.trace.callbacks import TraceOptions
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.mode import TracingMode
from hashbench.core.trace.native.tracer import NativeTracer
from hashbench.core.trace.segments import TraceSegment, TraceSegments
from hashbench.core.trace.tracer import choose


class SteppedTrace:
    """Trace that is taken part by part, while it is recorded; it can be started and stopped once.

    Args:
        tracer: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        model: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        settings: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        after_step: called with the optimizer after each of its steps, from :meth:`follow` until :meth:`unfollow`. It
            may start and stop the trace.
        options: what is recorded.
    """

    def __init__(
        self,
        *,
        after_step: Callable[[torch.optim.Optimizer], None],
        tracer: str = "auto",
        model: torch.nn.Module | None = None,
        settings: Callable[[], Mapping[str, str]] | None = None,
        options: TraceOptions | None = None,
    ) -> None:
        self.choice = choose(tracer, into_subclasses=True)
        options = options or TraceOptions()
        self._tracer: TracingMode | NativeTracer = (
            TracingMode(options) if self.choice.tracer == "python" else native.make_tracer(options)
        )
        self._settings, self._model = settings, model
        self._segments: TraceSegments | None = None
        self._tracer.raw.after_step = after_step

    @property
    def steps(self) -> int:
        """Number of steps so far: those of the most frequently stepped optimizer."""
        return self._tracer.raw.iteration or 0

    @property
    def is_active(self) -> bool:
        """True if ops are being recorded."""
        return self._tracer.raw.active

    @property
    def head(self) -> Trace:
        """Empty trace with the tracer of this one."""
        return Trace((), tracer=self.choice.tracer, tracer_reason=self.choice.reason)

    def follow(self) -> None:
        """Count the steps of optimizers from now on."""
        self._tracer.raw.modules.keep_counting(self._tracer.raw)

    def unfollow(self) -> None:
        """Stop counting steps."""
        self._tracer.raw.modules.stop_counting()

    def start(self) -> None:
        """Record every op from now on.

        Raises:
            HashbenchError: another trace is active.
        """
        refuse_nested()
        if self._model is not None:
            self._tracer.raw.register_model(self._model)
        self._mark("start")
        self._tracer.__enter__()
        self._segments = self._tracer.segments()

    def stop(self) -> None:
        """Stop recording, without waiting for collectives under way: their outputs stay ``pending``."""
        self._tracer.__exit__(_Stopped, None, None)
        self._mark("end")

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

    def settle(self) -> None:
        """Hash the outputs of collectives that are done."""
        self._tracer.raw.settle()

    def taken(self) -> TraceSegment:
        """Return what is new since the last call. Synchronizes devices."""
        assert self._segments is not None
        with untraced():  # the program is being recorded, and digests are fetched from devices
            return self._tracer.taken(self._segments)

    def _mark(self, label: str) -> None:
        if self._settings is not None:
            self._tracer.raw.mark(label, self._settings())


class _Stopped(Exception):  # noqa: N818 – never raised
    """Reason for a trace to end as after an exception: without waiting."""
