"""Where the time goes that the native tracer adds to a training step: one piece of the tracer at a time.

Apart from the others, a minute for each workload: ``python -m benchmarks.pieces --seconds 60``. The arms take parts of
the tracer away by what only this package may touch, and run in turn as those of ``overhead``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from benchmarks.overhead import Arm, added, interleaved
from benchmarks.table import Table, machine
from benchmarks.workloads import WORKLOADS, TrainingStep
from hashbench import HashDebugTrace
from hashbench.core.errors import HashbenchError
from hashbench.core.native.library import Library, unrecorded
from hashbench.core.trace import native

USUAL = "BERT-like, 4 layers, 128 wide, 1x32"


def measure(workload: str, *, seconds: float) -> Table:
    """What each piece adds to the step of a workload: medians over the repetitions of differences between two arms.

    Args:
        seconds: measure for about so long.

    Raises:
        HashbenchError: the native tracer cannot be used here.
    """
    loaded = native.load()
    if not isinstance(loaded, tuple):
        raise HashbenchError(loaded.what, consequence="nothing was measured", tip=loaded.advice)
    torch.manual_seed(0)
    step = WORKLOADS[workload]()
    taken = interleaved(step, seconds=seconds, arms=_arms(step, loaded[0]), warm_ups=8)
    base = statistics.median(taken["no mode"])
    rows = [(what, added(taken, whole, less)) for what, whole, less in _PIECES]
    rows.append(("native tracer", added(taken, "native")))
    cells = tuple((what, f"{1e6 * more:.0f}", f"{100 * more / base:.1f}") for what, more in rows)
    note = f"Untraced {1e3 * base:.1f} ms; {len(taken['no mode'])} repetitions. " + _NOTE
    return Table(
        f"What the native tracer adds: {workload}", ("what", "µs a step", "% of the untraced step"), cells, (note,)
    )


_NOTE = (
    "Each row but the last is the difference of two arms, so they need not sum up. "
    "Boxing costs at most so much: its arm boxes the calls inside kernels, too, which a trace passes by."
)
_PIECES = (
    ("entering and leaving the trace", "entered", "no mode"),
    ("noting which module is being called, and which step of the optimizer", "followed", "entered"),
    ("naming modules and their state, at the first call", "named", "followed"),
    ("calls boxed by torch and passed on, nothing recorded (at most)", "boxed", "entered"),
    ("digests", "native", "without digests"),
)
"""What is measured, and the two arms whose difference it is."""


def _arms(step: TrainingStep, library: Library) -> dict[str, Arm]:
    other = _trace(library, hashes=False)

    def traced(
        *, hashes: bool = True, calls: bool = True, follow: bool = True, named: bool = False, passed_on: bool = False
    ) -> Arm:
        def arm() -> AbstractContextManager[object]:
            trace = _trace(library, hashes=hashes)
            raw = trace._tracer.raw
            if named:
                raw.register_model(step.model)
            if not follow:
                raw.modules.install_hooks = raw.modules.remove_hooks = _nothing  # type: ignore[method-assign]
            if passed_on:
                return _passed_on(library, trace, other)
            return trace if calls else _unseen(trace)

        return arm

    return {
        "no mode": contextlib.nullcontext,
        "entered": traced(calls=False, follow=False),
        "followed": traced(calls=False, named=True),
        "named": traced(calls=False),
        "boxed": traced(follow=False, passed_on=True),
        "without digests": traced(hashes=False),
        "native": traced(),
    }


def _trace(library: Library, *, hashes: bool) -> HashDebugTrace:
    with contextlib.nullcontext() if hashes else without_digests(library):
        return HashDebugTrace(tracer="native")


@contextlib.contextmanager
def without_digests(library: Library) -> Iterator[None]:
    """A context in which native traces are made that record calls and hash nothing."""
    new = library.new
    library.new = lambda _, *others: new(0, *others)
    try:
        yield
    finally:
        library.new = new


@contextlib.contextmanager
def _unseen(trace: HashDebugTrace) -> Iterator[None]:
    """The trace, and no call comes to the recorder."""
    with trace, unrecorded():
        yield


@contextlib.contextmanager
def _passed_on(library: Library, trace: HashDebugTrace, other: HashDebugTrace) -> Iterator[None]:
    """The trace, and every call comes to the recorder's fallback, which passes it on, as in another trace's thread."""
    with trace:
        state = library.enter(other._tracer.nodes.recorder, 0)
        try:
            yield
        finally:
            library.leave(state)


def _nothing() -> None:
    return


def main() -> None:
    """Print the table of each workload that is asked for."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.pieces", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="for each workload (default 60)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default 1: steadier)")
    parser.add_argument(
        "--workloads", nargs="+", default=[USUAL], choices=[*WORKLOADS], metavar="W", help=f"default {USUAL}"
    )
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    print("\n".join(f"{name}: {value}" for name, value in machine().items()))
    for workload in parsed.workloads:
        print("\n" + measure(workload, seconds=parsed.seconds).text(), flush=True)


if __name__ == "__main__":
    main()
