"""Runs op signatures in isolation: the digests and some values of what they write, and whether repetitions agree."""

from __future__ import annotations

import base64
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from hashbench.errors import HashbenchError, named_line
from hashbench.fingerprint.calls import KernelCollector, call_of
from hashbench.fingerprint.document import Fingerprints, Kernel, ModelFingerprint, TensorWord
from hashbench.fingerprint.library import Listener, listener
from hashbench.fingerprint.values import scrambled
from hashbench.processes import Budget
from hashbench.replay.call import CapturedCall, Materialised, in_force, outcome_of, wait_for, written_tensors
from hashbench.run.rng import random_states
from hashbench.run.settings import deterministic_settings
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.op_schema import plan_of

REPEATS = 3
"""Runs of each signature; where they do not agree, it has no fingerprint."""

SAMPLES, FEWER_SAMPLES = 8, 2
"""Elements of the first output that are kept, and of each other."""

MOST_OUTPUTS = 3
"""Of a call that writes more (an optimizer's, of all parameters at once), the others have one digest together."""

VARIES = "gives other results when it is repeated"
RANDOM = "draws random numbers"
_LONGEST_REASON = 100


@dataclass(frozen=True, slots=True)
class Result:
    """What one run of a signature wrote: as words and samples of a :class:`Kernel`."""

    outputs: tuple[str, ...]
    samples: tuple[str, ...]


class NotRepeatableError(Exception):
    """Why a signature has no fingerprint; the text is the reason."""


@contextlib.contextmanager
def isolation(*, deterministic: str, threads: int | None) -> Iterator[None]:
    """The state in which signatures are run: settings as in a sweep, no gradients, nobody watching."""
    nothing = CapturedCall("", None, (), {}, (), ())
    with deterministic_settings(deterministic, threads=threads), in_force(nothing):
        yield


def result_of(call: CapturedCall) -> Result:
    """Run a call once, on memory of its own; for use inside :func:`isolation`.

    Raises:
        NotRepeatableError: it draws random numbers.
        Exception: whatever the op raises.
    """
    seeded = plan_of(call.func).seeded
    before = random_states(call.device, outside_torch=False) if seeded else {}
    live = call.materialise()
    output = live.run()
    wait_for(call.accelerators)
    if seeded and any(
        not torch.equal(state, before[name]) for name, state in random_states(call.device, outside_torch=False).items()
    ):
        raise NotRepeatableError(RANDOM)
    return _left(output, live)


def _left(output: Any, live: Materialised) -> Result:
    outcome, written = outcome_of(output, live), written_tensors(output, live)
    words = [
        TensorWord(digest.dtype, digest.shape, digest.stride, digest=digest.value or "blank").text()
        for digest in outcome.written
    ]
    samples = [
        _sampled(tensor, SAMPLES if not number else FEWER_SAMPLES)
        for number, tensor in enumerate(written[:MOST_OUTPUTS])
    ]
    if len(words) > MOST_OUTPUTS:
        rest = " ".join(words[MOST_OUTPUTS:]).encode()
        others = TensorWord("others", (len(words) - MOST_OUTPUTS,), (1,), digest=xxhash.xxh3_64_hexdigest(rest))
        words, samples = [*words[:MOST_OUTPUTS], others.text()], [*samples, ""]
    return Result(tuple(words), tuple(samples))


def sample_places(elements: int, most: int = SAMPLES) -> np.ndarray[Any, Any]:
    """Which ``most`` elements of so many are kept, in logical order: spread as by chance, the same on every machine."""
    if elements <= most:
        return np.arange(elements)
    return (scrambled(most) % np.uint64(elements)).astype(np.int64)


def _sampled(tensor: torch.Tensor, most: int) -> str:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return ""
    places = np.unravel_index(sample_places(tensor.numel(), most), tuple(tensor.shape)) if tensor.dim() else ()
    index = tuple(torch.from_numpy(np.ascontiguousarray(place)).to(tensor.device) for place in places)
    values = tensor.detach()[index] if index else tensor.detach().reshape(-1)
    return base64.b64encode(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode()


# -------------------------------------------------------------------------------------------------------- recording


@dataclass(frozen=True, slots=True)
class Measured:
    """The signatures of a model with what they gave, and those that have no fingerprint, as
    :class:`~hashbench.fingerprint.document.ModelFingerprint` has them."""

    kernels: tuple[Kernel, ...]
    contents: tuple[str, ...]
    left_out: Mapping[str, Mapping[str, int]]


def record(run: Callable[[], object], *, name: str, deterministic: str = "on") -> Fingerprints:
    """The fingerprint of every kernel that a function calls, on the CPU, with the number of threads of this process.

    Args:
        run: called once, traced.
        name: how the fingerprints call it.
        deterministic: the level (:func:`~hashbench.run.settings.deterministic_settings`) in force for its kernels.
    """
    collector = KernelCollector()
    with HashDebugTrace(watcher=collector):
        run()
    with isolation(deterministic=deterministic, threads=None):
        made = measure(collector, device=torch.device("cpu"))
    model = ModelFingerprint(
        suite="",
        name=name,
        mode="",
        device="cpu",
        dtype="",
        deterministic=deterministic,
        threads=torch.get_num_threads(),
        kernels=made.kernels,
        contents=made.contents,
        left_out=made.left_out,
    )
    return Fingerprints({}, (model,))


def measure(collected: KernelCollector, *, device: torch.device, seconds: float = 3600.0) -> Measured:
    """Run every collected signature :data:`REPEATS` times; for use inside :func:`isolation`. One that has not begun
    after so many ``seconds`` is left out."""
    budget, contents = Budget(seconds), tuple(collected.contents)
    left_out: defaultdict[str, Counter[str]] = defaultdict(Counter, collected.left_out)
    kernels = []
    with listener() as listening:
        for kernel in collected.kernels:
            if budget.left() <= 0:
                left_out[f"no time left after {seconds:g} s"][kernel.op] += kernel.calls
                continue
            measured, reason = _measured(kernel, contents, device, listening)
            if reason:
                left_out[reason][kernel.op] += kernel.calls
            else:
                kernels.append(measured)
    return Measured(tuple(kernels), contents, left_out)


def _measured(kernel: Kernel, contents: Sequence[str], device: torch.device, listening: Listener) -> tuple[Kernel, str]:
    """The kernel with what it gave, or why it has no fingerprint."""
    results: list[Result] = []
    try:
        call = call_of(kernel, contents, device=device)
        results += [result_of(call) for _ in range(REPEATS - 1)]
        library = listening.library_of(call.func, device, lambda: results.append(result_of(call)))
    except (NotRepeatableError, ValueError, HashbenchError) as error:
        return kernel, str(error)[:_LONGEST_REASON]
    except Exception as error:
        return kernel, f"raises on synthetic inputs: {named_line(error, limit=_LONGEST_REASON)}"
    if any(result != results[0] for result in results):
        return kernel, VARIES
    made = replace(kernel, library=library, outputs=results[0].outputs, samples=results[0].samples)
    return made, "" if made.outputs else "writes nothing"
