"""Record the kernel fingerprint of a model or a function: its op signatures from one traced run, then each run in
isolation; and verify it against a file."""

from __future__ import annotations

import ctypes
import functools
import mmap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from hashbench.core.catalog import Status
from hashbench.core.check.function import SUITE, FunctionCall, FunctionRuns, requested_settings
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.check.pair import again_with_warnings
from hashbench.core.diagnose.replay.controls.memory import set_malloc_option
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.finding import Finding
from hashbench.core.processes import tell_phase
from hashbench.core.records import Failure, ModelSpec, Row, RunOptions
from hashbench.core.run.environment import collect
from hashbench.core.run.outcome import release_memory
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.settings import preserved, settings
from hashbench.core.text import count
from hashbench.core.trace.tracer import choose
from hashbench.extensions.fingerprint import checking, document
from hashbench.extensions.fingerprint.calls import KernelCollector
from hashbench.extensions.fingerprint.document import Fingerprints, ModelFingerprint
from hashbench.extensions.fingerprint.measure import isolation, measure
from hashbench.extensions.fingerprint.text import failure_of, finding_of
from hashbench.extensions.fingerprint.verify import VerifyRequest, summary

SECONDS = 60.0
"""CPU seconds of one thread after which no further kernel of a model is run; the fingerprint lists the rest as left
out."""


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Of ``mallopt``, in the headers of glibc."""

_SMALLEST = 2**28
"""Smallest allocation, in bytes, for which large pages pay."""

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
"""Holds ``2`` if Linux accounts for memory that a process has reserved and not touched."""


def fingerprint_of(spec: ModelSpec, options: RunOptions, *, own_process: bool = False) -> ModelFingerprint | Failure:
    """Record the fingerprint of a model; return why if it cannot be run. Settings and random state are restored.

    With ``own_process`` this process does nothing else, and keeps the memory that kernels free from then on.
    """
    runner = BenchmarkRunner(options)
    wanted = options.deterministic or spec.deterministic or "on"
    with preserved_rng():
        if own_process:
            keep_freed_memory()
        collected, _ = again_with_warnings(functools.partial(_collected, runner, spec), wanted)
        return collected.failure or fingerprint_from(collected.kernels, spec, options, level=collected.deterministic)


def keep_freed_memory() -> bool:
    """Let the C library reuse freed memory until the process ends, and request large pages for it; return False if the
    C library cannot.

    Otherwise large tensors come from the system each time, page by page, each of which it clears: that was half of the
    time of a large model.
    """
    if not (set_malloc_option(_MMAP_MAX, 0) and set_malloc_option(_TRIM_THRESHOLD, -1)):
        return False
    if not OVERCOMMIT.exists() or OVERCOMMIT.read_text(encoding="utf-8").strip() != "2":
        _ask_for_large_pages()
    return True


def _ask_for_large_pages() -> None:
    """Request large pages for the free memory of the machine, from which later allocations come; none of it is touched
    here."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    size, block = psutil.virtual_memory().available, None
    while size >= _SMALLEST and not (block := library.malloc(ctypes.c_size_t(size))):
        size //= 2
    if block:
        begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (block + size - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
        library.free(ctypes.c_void_p(block))


@dataclass(frozen=True, slots=True)
class _Collected:
    """The signatures of one run at this deterministic level, or why it failed."""

    kernels: KernelCollector
    deterministic: str
    failure: Failure | None = None


def _collected(runner: BenchmarkRunner, spec: ModelSpec, level: str) -> _Collected:
    """Collect the signatures of one run at this deterministic level; the model's memory is free again."""
    collector = KernelCollector()
    tell_phase("collecting its kernels")
    try:
        run = runner.watched_run(spec, collector, level=level)
    except Exception as error:  # of the model's own code
        return _Collected(collector, level, Failure(named_line(error)))
    finally:
        release_memory(runner.device)
    return _Collected(collector, level, run if isinstance(run, Failure) else None)


def fingerprint_from(
    collected: KernelCollector, spec: ModelSpec, options: RunOptions, *, level: str, seconds: float = SECONDS
) -> ModelFingerprint:
    """Record the fingerprint of a model whose run, at deterministic ``level``, was collected.

    Each kernel runs in isolation; those not started after ``seconds`` of CPU time are left out.
    """
    tell_phase("running its kernels")
    with isolation(deterministic=level, threads=options.threads):
        measured = measure(collected, device=torch.device(options.device), seconds=seconds)
        threads = torch.get_num_threads()
    return ModelFingerprint(
        suite=spec.suite,
        name=spec.name,
        mode=options.mode,
        device=options.device,
        dtype=options.dtype_column,
        deterministic=level,
        threads=threads,
        kernels=measured.kernels,
        contents=measured.contents,
        left_out=measured.left_out,
    )


def record_model(spec: ModelSpec, options: RunOptions) -> Row:
    """Write a model's fingerprint into a file of its own in ``options.output``: the entry point of a worker of
    ``hashbench fingerprint record``. The row says why if there is none."""
    made = fingerprint_of(spec, options, own_process=True)
    row = Row(options.device, spec.name, None, Status.PASS, suite=spec.suite, mode=options.mode)
    if isinstance(made, Failure):
        return replace(row, accuracy=Status.FIRST_RUN_FAIL, error=made.error)
    document.write(document.path_in(Path(options.output), made.key), Fingerprints({}, (made,)))
    return row


# ------------------------------------------------------------------------------------------------------- a function


def collected_kernels(call: FunctionCall, options: RunOptions) -> KernelCollector:
    """Collect the kernels that one run of a function calls, on copies of its arguments and from the reset state.

    Settings and random state of the caller are restored. Exceptions of the function are raised unchanged.

    Args:
        call: the function and its arguments.
        options: ``seed``, ``deterministic`` (empty: torch's settings as they are), ``threads`` and ``tracer`` are used.

    Raises:
        HashbenchError: an argument cannot be copied, or the requested tracer is unavailable.
    """
    choose(options.tracer)
    collector = KernelCollector()
    with preserved(), preserved_rng(), requested_settings(options, options.deterministic):
        FunctionRuns(call, options, every_op=False, allow_empty=True).collected_by(collector)
    return collector


def record_function(call: FunctionCall, name: str, options: RunOptions, path: Path) -> str:
    """Write the fingerprint of every kernel that a function calls to a file, and return their number in words.

    Args:
        call: the function and its arguments, which are copied.
        name: its name in the file.
        options: ``device``, ``seed``, ``deterministic`` (empty: the level in force), ``threads`` and ``tracer`` are
            used.
        path: the file; an existing one is overwritten.

    Raises:
        HashbenchError: an argument cannot be copied, no kernel has a fingerprint, or the file cannot be written.
    """
    collected = collected_kernels(call, options)
    level = options.deterministic or settings()["deterministic_algorithms"]
    model = fingerprint_from(collected, ModelSpec(SUITE, name), replace(options, mode=""), level=level)
    if not model.kernels:
        left_out = ", ".join(model.left_out) or "it calls none"
        raise HashbenchError("no kernel has a fingerprint", consequence=f"nothing was written ({left_out})")
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write(path, Fingerprints(_environment(options, model.threads), (model,)))
    return f"{count(len(model.kernels), 'kernel')}, {path.stat().st_size} bytes"


def changed_kernels(
    call: FunctionCall, name: str, options: RunOptions, path: Path, *, keep: Path, how_to_record: str
) -> Finding | None:
    """Report the kernels of a function that differ from a file; ``None`` if none does.

    Kernels run in this process, with as many threads as when they were recorded unless ``options.threads`` is set.

    Args:
        call: the function and its arguments, which are copied.
        name: its name in the file.
        options: as in :func:`record_function`.
        path: the file.
        keep: file to write with the whole list if kernels changed.
        how_to_record: the command or call that records the file again.

    Raises:
        HashbenchError: the file cannot be used or is of another function, or an argument cannot be copied.
    """
    chosen = VerifyRequest(str(path), only=(name,)).chosen(document.read(path))
    (model,) = (model for model in chosen.models if model.name == name)
    if model.device != options.device:
        devices = f"it was recorded on {model.device}, and this runs on {options.device}"
        raise HashbenchError(f"cannot compare with {path}", consequence=devices)
    threads = options.threads or model.threads
    verification = summary(chosen, list(checking.check(chosen, threads=threads)))
    left_out = {op for ops in model.left_out.values() for op in ops}
    here = {kernel.signature(): kernel for kernel in collected_kernels(call, options).kernels}
    recorded = {kernel.signature(): kernel for kernel in model.kernels}
    new = [kernel for key, kernel in here.items() if key not in recorded and kernel.op not in left_out]
    gone = [kernel for key, kernel in recorded.items() if key not in here]
    if not (verification.changed or verification.not_run or new or gone):
        return None
    environment = _environment(options, threads)
    verified = finding_of(verification, recorded=chosen.environment, here=environment)
    found = failure_of(verified, verification, since=path.name, new=new, gone=gone, how_to_record=how_to_record)
    keep.parent.mkdir(parents=True, exist_ok=True)
    keep.write_text(f"{verified}\n", encoding="utf-8")
    kept = keep.resolve()
    shown = kept.relative_to(Path.cwd()) if kept.is_relative_to(Path.cwd()) else kept
    facts = (*found.facts, ("each kernel", str(shown)))
    return replace(found, headline=f"{name}: {found.headline}", facts=facts)


def _environment(options: RunOptions, threads: int) -> dict[str, Any]:
    """Return the environment of this process, with the threads of the kernels."""
    environment = collect(options.device, tracer=options.tracer)
    return {**environment, "threads": {**environment["threads"], "intra_op": threads}}
