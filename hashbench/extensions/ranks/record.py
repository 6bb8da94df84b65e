"""Trace this rank of a program step by step, into a folder that all ranks share.

No collective is added and nothing is waited for: each rank writes a file of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.run.recorder import StepRecorder, told_of_termination
from hashbench.core.run.script import refuse_missing, run_as_main
from hashbench.core.text import ending
from hashbench.core.trace.groups import rank_of
from hashbench.extensions.ranks.notes import REPRO, NamedCall
from hashbench.extensions.ranks.printing import keeping_prints
from hashbench.extensions.ranks.results import CURRENT
from hashbench.extensions.ranks.waiting import telling_at_deadline

if TYPE_CHECKING:
    from hashbench.extensions.ranks.capture import RankCapture


@contextmanager
def record_ranks(
    folder: str | Path,
    model: torch.nn.Module | None = None,
    steps: range | None = None,
    *,
    tracer: str = "auto",
    source_lines: bool = False,
    capture: Sequence[str] = (),
) -> Iterator[None]:
    """Trace this rank, step by step, into ``rank{R}.log.gz`` of a folder that all ranks share.

    A step ends with each step of the most frequently stepped optimizer; a program without one is a single step. The
    parameters of every optimizer that stepped are results, and whatever :func:`~hashbench.result` adds.

    Args:
        folder: of this recording; earlier files of its ranks are replaced.
        model: names modules and parameters from the start; without it they have names from their first call on.
        steps: records these steps only, such as ``range(2, 4)``; consecutive.
        tracer: as for :class:`~hashbench.core.trace.api.HashDebugTrace`.
        source_lines: records the line of the program behind every op, too.
        capture: ids of records, ``ID@RANK`` or for every rank ``ID``, one call of each rank: the call is kept, and when
            the program has ended its repro is written into ``repro``; of a collective, name the record of each rank.

    Raises:
        HashbenchError: the folder cannot be made or has a ``repro``, another trace is active, ``steps`` are not
            consecutive, or the tracer is unavailable. What the program raises passes unchanged, as does its exit code.
    """
    if steps is not None and (steps.step != 1 or steps.start < 0 or not steps):
        raise HashbenchError(
            f"invalid steps {steps.start}:{steps.stop}",
            consequence="nothing was recorded",
            tip="Use START:STOP, 0 <= START < STOP: `--steps 2:4` records 2 and 3.",
        )
    captured = _capture_of(Path(folder), (capture,) if isinstance(capture, str) else capture)
    recorder = StepRecorder(Path(folder), model, steps, tracer=tracer, source_lines=source_lines, capture=captured)
    recorder.start()
    token = CURRENT.set(recorder.add)
    ended = ""
    try:
        with told_of_termination(recorder):
            yield
    except BaseException as error:
        ended = ending(error)
        raise
    finally:
        CURRENT.reset(token)
        recorder.end(ended)
        if captured is not None:
            captured.write()


def _capture_of(folder: Path, words: Sequence[str]) -> RankCapture | None:
    if not words:
        return None
    from hashbench.extensions.ranks.capture import RankCapture  # which imports all experiments

    if (folder / REPRO).exists():
        raise HashbenchError(
            f"{folder / REPRO} exists",
            consequence="two repros would be mixed, so the program was not started",
            tip="Name another folder.",
        )
    return RankCapture([NamedCall.of(word) for word in words], folder, rank=lambda: (rank_of(os.environ) or (0, 1))[0])


def run_script(
    folder: str | Path,
    script: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    **options: Any,
) -> None:
    """Run an unchanged script under :func:`record_ranks`, as ``python script arguments`` does.

    Args:
        folder: of this recording.
        script: path of the script; with ``module``, the name of a module, as for ``python -m``.
        arguments: of the script.
        module: ``script`` is the name of a module.
        options: as for :func:`record_ranks`, but for ``model``.

    Raises:
        HashbenchError: as for :func:`record_ranks`; there is no such script. Whatever the script raises passes,
            ``SystemExit`` included.
    """
    refuse_missing(script, module=module)
    with (
        telling_at_deadline(Path(folder)),
        keeping_prints(Path(folder), (rank_of(os.environ) or (0, 1))[0]),
        record_ranks(folder, **options),
    ):
        run_as_main(script, arguments, module=module)
