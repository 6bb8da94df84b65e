"""Rerun recorded signatures on this machine and compare their outputs with the recorded ones.

:func:`main` runs in the process that ``hashbench fingerprint verify`` starts; call :func:`check` in your own.
"""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.ops import load
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.io import from_json, to_json
from hashbench.core.processes import exit_at_once
from hashbench.extensions.fingerprint.calls import call_of
from hashbench.extensions.fingerprint.distance import Distance, distance
from hashbench.extensions.fingerprint.document import VARIES, Fingerprints, Kernel, ModelFingerprint, read, tensor_word
from hashbench.extensions.fingerprint.library import Listener, listener
from hashbench.extensions.fingerprint.measure import CallFingerprint, NotRepeatableError, isolation, result_of
from hashbench.extensions.fingerprint.values import Arena
from hashbench.extensions.fingerprint.verify import CHANGED, NOT_RUN, SAME, Checked, VerifyRequest

REPEATS = 5
"""Runs of a signature with a different result: the recorded result may be one of several."""

MEMORY = 2**34
"""Bytes of host memory that checking may add to the process: a file may ask for any size."""


def check(
    fingerprints: Fingerprints,
    *,
    threads: int | None = None,
    begin: Callable[[int], object] = lambda _: None,
    skip: Collection[int] = (),
) -> Iterator[Checked]:
    """Run every kernel of a file in this process, duplicates across models once. Restores settings afterwards.

    Args:
        fingerprints: the recording.
        threads: torch threads; ``None`` keeps the current number.
        begin: called with the number of each kernel before it runs.
        skip: numbers of kernels not to run.
    """
    numbers = itertools.count()
    known: dict[tuple[str, ...], Checked] = {}
    arenas = Arena(), Arena()
    with listener() as listening:
        for model in fingerprints.models:
            with isolation(deterministic=model.deterministic, threads=threads):
                for kernel, number in zip(model.kernels, numbers, strict=False):
                    if number in skip:
                        continue
                    run = model.run_of(kernel)
                    if run not in known:
                        begin(number)
                        known[run] = _checked(model, kernel, number, listening, arenas)
                    yield replace(known[run], number=number)


def _checked(
    model: ModelFingerprint, kernel: Kernel, number: int, listening: Listener, arenas: tuple[Arena, Arena]
) -> Checked:
    """Run one kernel and compare; ``arenas`` hold its own memory and the copies."""
    made, copies = arenas
    recorded = CallFingerprint(kernel.outputs, kernel.samples)
    try:
        device = torch.device(model.device)
        seen = result_of(call_of(kernel, model.contents, device=device, arena=made), last=True)
        if seen.outputs == recorded.outputs:
            return Checked(number, SAME)
        call = call_of(kernel, model.contents, device=device)
        _refuse_varying(call, seen, recorded, copies)
        library = listening.library_of(call.func, device, lambda: result_of(call, arena=copies))
    except (NotRepeatableError, ValueError, HashbenchError) as error:
        return Checked(number, NOT_RUN, str(error)[:200])
    except Exception as error:
        return Checked(number, NOT_RUN, f"raises {named_line(error, limit=160)}")
    return Checked(number, CHANGED, _form_of(recorded, seen), library, _distance(recorded, seen))


def _refuse_varying(call: CapturedCall, seen: CallFingerprint, recorded: CallFingerprint, copies: Arena) -> None:
    for repetition in range(1, REPEATS):
        again = result_of(call, repetition, arena=copies)
        if again != seen or again.outputs == recorded.outputs:
            raise NotRepeatableError(VARIES)


def _form_of(recorded: CallFingerprint, seen: CallFingerprint) -> str:
    """Describe how dtypes, shapes or strides of the outputs differ; empty if they do not."""
    old, new = ([tensor_word(word).shown for word in result.outputs] for result in (recorded, seen))
    return "" if old == new else f"{', '.join(old)} -> {', '.join(new)}"


def _distance(recorded: CallFingerprint, seen: CallFingerprint) -> Distance:
    """Measure the distance of the sampled elements of two results."""
    words = [tensor_word(word).dtype for word in recorded.outputs]
    kinds = [getattr(torch, dtype, None) for dtype in words]
    return distance(
        (dtype, kind.itemsize, old, new)
        for dtype, kind, old, new in zip(words, kinds, recorded.samples, seen.samples, strict=False)
        if isinstance(kind, torch.dtype)
    )


# ------------------------------------------------------------------------------------------------------ in a child


def main(request: str, answers: str) -> None:
    """Check what ``request`` asks for and write JSON lines to the file ``answers``.

    Per kernel: its number when it begins, and the :class:`Checked` when it is done. ``request`` is the JSON of a
    :class:`~hashbench.extensions.fingerprint.verify.VerifyRequest`.
    """
    asked = from_json(VerifyRequest, json.loads(request))
    for name in asked.imports:
        load(name)
    fingerprints = read(Path(asked.path))
    if not any(model.device != "cpu" for model in fingerprints.models):
        _limit_memory()
    with Path(answers).open("a", encoding="utf-8") as file:

        def tell(line: object) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        for checked in check(asked.chosen(fingerprints), threads=asked.threads, begin=tell, skip=asked.skip):
            tell(to_json(checked))
        tell("done")
    exit_at_once()


def _limit_memory() -> None:
    """Limit the address space of this process to what a sane file needs, to fail instead of being OOM-killed."""
    have = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (have + MEMORY, hard))
