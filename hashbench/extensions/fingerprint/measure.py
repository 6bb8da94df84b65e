"""Run op signatures in isolation: digest and sample their outputs, and check that repetitions agree."""

from __future__ import annotations

import base64
import contextlib
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from hashbench.core.diagnose.calls.call import CapturedCall, plan_for
from hashbench.core.diagnose.calls.capture import is_plain, may_resize
from hashbench.core.diagnose.calls.live import LiveCall, captured_environment
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.run.rng import random_states, states_differ
from hashbench.core.run.settings import deterministic_settings
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.digest import (
    BY_DTYPE,
    RawDigest,
    hash_memory,
    is_dense,
    raw_digest,
    readable,
    without_repetition,
)
from hashbench.extensions.fingerprint.calls import KernelCollector, call_of
from hashbench.extensions.fingerprint.document import VARIES, Fingerprints, Kernel, ModelFingerprint, TensorWord
from hashbench.extensions.fingerprint.library import Listener, listener
from hashbench.extensions.fingerprint.values import Arena, bits_of, scrambled

REPEATS = 3
"""Runs of each signature; if they disagree, it has no fingerprint."""

LONG = 0.02
"""CPU seconds of the calling thread, independent of other load. A signature that takes longer is run once less."""

LARGE = 2**24
"""Bytes of a call's inputs above which copies are avoided: touching unused pages costs more than writing to them."""

SAMPLES, FEWER_SAMPLES = 8, 2
"""Elements of the first output that are kept, and of each other."""

MOST_OUTPUTS = 3
"""Outputs with a digest of their own; further ones (of an optimizer over all parameters) share one digest."""

RANDOM = "draws random numbers"
_RAISES = "raises on synthetic inputs"
_LONGEST_REASON = 100


@dataclass(frozen=True, slots=True)
class CallFingerprint:
    """Outputs of one run of a signature, as words and samples of a :class:`Kernel`."""

    outputs: tuple[str, ...]
    samples: tuple[str, ...]


class NotRepeatableError(Exception):
    """The signature has no fingerprint; the message is the reason."""


@contextlib.contextmanager
def isolation(*, deterministic: str, threads: int | None) -> Iterator[None]:
    """Set up the state in which signatures run: sweep settings, no grad, no dispatch modes."""
    with deterministic_settings(deterministic, threads=threads), captured_environment():
        yield


def result_of(
    call: CapturedCall, repetition: int = 0, *, arena: Arena | None = None, last: bool = False
) -> CallFingerprint:
    """Run a call once and return what it writes. Use inside :func:`isolation`.

    The run gets its own memory, at a different offset (modulo 4096) in each of 64 repetitions, on the host within
    ``arena``. The ``last`` run of a call may use, and overwrite, the memory of the call itself.

    Raises:
        NotRepeatableError: the op draws random numbers, or writes a tensor that is not strided.
        Exception: raised by the op.
    """
    written = _written(call, repetition, arena or Arena(), last=last)
    return _result(written, list(map(_digest, written)))


def _written(call: CapturedCall, repetition: int, arena: Arena, *, last: bool = False) -> Sequence[torch.Tensor]:
    """Run a call once and return the tensors it wrote, which the next run in this arena overwrites."""
    seeded = plan_for(call.func).seeded
    before = random_states(call.device, outside_torch=False) if seeded else {}
    written = LiveCall(call, rooms=_rooms(call, repetition, arena, last=last)).run().written
    if seeded and states_differ(before, random_states(call.device, outside_torch=False)):
        raise NotRepeatableError(RANDOM)
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in written):
        raise NotRepeatableError("writes a tensor of a special kind")
    return written


def _rooms(call: CapturedCall, repetition: int, arena: Arena, *, last: bool) -> Sequence[torch.Tensor] | None:
    """Return the memory of one run; ``None`` for memory that torch allocates, which alone can be resized."""
    contents = [memory.content for memory in call.memories]
    if may_resize(call.func) or not (last or all(content.is_cpu for content in contents)):
        return None
    if last:
        return contents
    rooms = arena.rooms([content.nbytes for content in contents], repetition=repetition)
    return list(map(torch.from_numpy, rooms))


def _result(written: Sequence[torch.Tensor], digests: Sequence[RawDigest]) -> CallFingerprint:
    """Convert the tensors that a run wrote to words and samples."""
    words = [
        TensorWord(digest.dtype, digest.shape, digest.stride, digest=digest.value or "blank").text()
        for digest in map(readable, digests)
    ]
    samples = [
        _sampled(tensor, SAMPLES if not number else FEWER_SAMPLES)
        for number, tensor in enumerate(written[:MOST_OUTPUTS])
    ]
    if len(words) > MOST_OUTPUTS:
        rest = " ".join(words[MOST_OUTPUTS:]).encode()
        others = TensorWord("others", (len(words) - MOST_OUTPUTS,), (1,), digest=xxhash.xxh3_64_hexdigest(rest))
        words, samples = [*words[:MOST_OUTPUTS], others.text()], [*samples, ""]
    return CallFingerprint(tuple(words), tuple(samples))


@functools.lru_cache(maxsize=1024)
def sample_places(elements: int, most: int = SAMPLES) -> np.ndarray[Any, Any]:
    """Return pseudo-random indices, in logical order, of the sampled elements; the same on every machine."""
    if elements <= most:
        return np.arange(elements)
    return (scrambled(most) % np.uint64(elements)).astype(np.int64)


def _sampled(tensor: torch.Tensor, most: int) -> str:
    if not _has_bits(tensor):
        return ""
    bits, shape = bits_of(tensor), tuple(tensor.shape)
    places = np.unravel_index(sample_places(tensor.numel(), most), shape) if shape else ()
    return base64.b64encode(np.ascontiguousarray(bits[places]).tobytes()).decode()


def _has_bits(tensor: torch.Tensor) -> bool:
    """Return whether memory holds the elements as they are."""
    return is_plain(tensor) and not (tensor.is_conj() or tensor.is_neg())


def _digest(tensor: torch.Tensor) -> RawDigest:
    """Digest a tensor as a trace does; one with holes is packed by NumPy."""
    if not tensor.is_cpu or not _has_bits(tensor) or not tensor.numel() or tensor.dtype in BY_DTYPE:
        return raw_digest(tensor)
    shape, stride = tensor.shape, tensor.stride()
    if tensor.is_contiguous() or is_dense(tensor):
        return tensor.dtype, shape, stride, hash_memory(tensor.data_ptr(), tensor.nbytes)
    packed = np.ascontiguousarray(bits_of(without_repetition(tensor.detach())))
    return tensor.dtype, shape, stride, hash_memory(packed.ctypes.data, packed.nbytes)


# -------------------------------------------------------------------------------------------------------- recording


@dataclass(frozen=True, slots=True)
class Measured:
    """The signatures of a model with their outputs, and those without a fingerprint.

    Fields are those of :class:`~hashbench.extensions.fingerprint.document.ModelFingerprint`.
    """

    kernels: tuple[Kernel, ...]
    contents: tuple[str, ...]
    left_out: Mapping[str, Mapping[str, int]]


def record(run: Callable[[], object], *, name: str, deterministic: str = "on") -> Fingerprints:
    """Record the fingerprint of every kernel that a function calls, on the CPU, with the current number of threads.

    Args:
        run: called once, traced.
        name: of the fingerprints.
        deterministic: level (:func:`~hashbench.core.run.settings.deterministic_settings`) in force for its kernels.
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
    """Run every collected signature :data:`REPEATS` times, slow ones once less. Use inside :func:`isolation`.

    Signatures not started after so many CPU ``seconds`` of this thread are left out.
    """
    arenas = Arena(), Arena()
    began, contents = time.thread_time(), tuple(collected.contents)
    left_out: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for reason, ops in collected.left_out.items():
        left_out[reason].update(ops)
    kernels = []
    with listener() as listening:
        for kernel in collected.kernels:
            if time.thread_time() - began >= seconds:
                left_out[f"no time left after {seconds:g} CPU s"][kernel.op] += kernel.calls
                continue
            measured, reason = _measured(kernel, contents, device, listening, arenas)
            if reason:
                left_out[reason][kernel.op] += kernel.calls
            else:
                kernels.append(measured)
    return Measured(tuple(kernels), contents, left_out)


def _measured(
    kernel: Kernel, contents: Sequence[str], device: torch.device, listening: Listener, arenas: tuple[Arena, Arena]
) -> tuple[Kernel, str]:
    """Return the kernel with its outputs, and an empty reason, or why it has no fingerprint.

    ``arenas`` hold its own memory and the copies.
    """
    made, copies = arenas
    results: list[CallFingerprint] = []
    digests: list[list[RawDigest]] = []

    def repeat(*, last: bool = False) -> None:
        if large and digests:  # made anew: that takes no longer than a copy, and half as much memory
            again = call_of(kernel, contents, device=device, arena=made, repetition=len(digests))
        else:
            again = call
        written = _written(again, len(digests), copies, last=last or large)
        digests.append(list(map(_digest, written)))
        if not results:  # what is equal by its digests is equal in words
            results.append(_result(written, digests[0]))

    try:
        call = call_of(kernel, contents, device=device, arena=made)
        large = sum(memory.content.nbytes for memory in call.memories) > LARGE
        began = time.thread_time()
        repeat()
        if time.thread_time() - began < LONG:
            repeat()
        library = listening.library_of(call.func, device, functools.partial(repeat, last=True))
    except (NotRepeatableError, ValueError, HashbenchError) as error:
        return kernel, str(error)[:_LONGEST_REASON]
    except Exception as error:
        return kernel, f"{_RAISES}: {named_line(error, limit=_LONGEST_REASON)}"
    if any(other != digests[0] for other in digests):
        return kernel, VARIES
    (result,) = results
    measured = replace(kernel, library=library, outputs=result.outputs, samples=result.samples)
    return measured, "" if measured.outputs else "writes nothing"
