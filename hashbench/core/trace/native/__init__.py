"""The native tracer: a C++ recorder sees every call, and Python builds a trace from its records.

``ops`` passes schemas to the recorder, ``forwarded`` answers its callbacks during a trace, ``nodes`` shares numbers and
marks with it, ``threads`` begins lanes, ``decode`` reads its records, and ``tracer`` builds the trace.

``recorder.cpp`` is a fallback on the dispatch key ``Fake``, unused in torch 2.11 to 2.15 and the last key before
kernels, so that autograd, autocast, functorch, dispatch modes and tensor subclasses have run, as where a mode sees a
call. In torch 2.11 it lies before ``Python``: calls within a subclass's op are not seen there.

* Dense CPU calls are recorded in C++, 1 to 2 µs each beside their digests. A table maps storages to their writers;
  weak references keep the storage's struct, not its memory.
* About seventy usual ops (``native/unboxed.h``) have unboxed kernels at the recorder's key, shared by all ops of a
  signature; other ops, and the first call of an op, take the boxed fallback.
* Sparse, quantized and nested tensors, accelerators, collectives, parts of leaves, and calls with an observer
  (``hash_inputs``, ``source_lines``, a watcher) are forwarded to Python by a second key. Python makes the call
  through ``hashbench::make``; any other op that arrives meanwhile comes from a signal handler or a finalizer, and is
  recorded as such.
* Kernels and allocators of compiled code are not dispatched: Python makes their calls, and the recorder their records
  (``kernels``), except where an argument is a part of a leaf or no plain tensor.
* Calls inside an ``aten`` kernel are not recorded: the op is the unit that torch documents and replays. Calls inside
  other ops (custom ops, extensions) are; the outer op shows what they wrote.
* Python receives aliases of plain tensors: another Python object would count as another owner, and autograd would
  accumulate by ``add`` in place of ``add_``.
* Content above 128 KiB is hashed by torch's own OpenMP threads where that is faster; both ways are timed by size.
  These threads are ended before a fork.
* Threads, ``ThreadPoolExecutor`` and ``ThreadPool`` started during a trace run in lanes, which are ordered by the
  program alone when the trace is finished: ``aten.mm.default#t0.2`` is the third ``mm`` of that module's first
  thread. Not seen: pool initializers, callbacks of ``concurrent.futures``, ``imap`` over iterators, older threads.
* Equal traces of one process are recognized by 128 bits of digest (``NativeTracer.content``); records are built only
  on demand.
* One trace at a time per process; 70 to 90 bytes per record until the trace is finished.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

from hashbench.core.native.build import RETRY, TRIAL, Unavailable, build
from hashbench.core.native.library import Library, is_free, is_recorded
from hashbench.core.text import one_line, shorten
from hashbench.core.trace.callbacks import TraceOptions
from hashbench.core.trace.digest import digest, has_no_data
from hashbench.core.trace.module_paths import known_original
from hashbench.core.trace.native.ops import Ops
from hashbench.core.trace.native.tracer import NativeTracer


@functools.cache
def load() -> tuple[Library, Ops] | Unavailable:
    """Load the recorder into this process, compiling it if necessary; return it with the ops it has met, or the reason
    why it is unavailable."""
    if not is_free():
        return Unavailable(
            f"torch {torch.__version__} has no free dispatch key for the recorder", "install torch 2.13 or newer"
        )
    built = build(trial=TRIAL)
    if isinstance(built, Unavailable):
        return built
    try:
        return _opened(built.path)
    except (OSError, AttributeError) as error:
        return Unavailable(f"the native recorder cannot be loaded ({one_line(str(error))})", RETRY)


def trial(path: str) -> int:
    """Load a freshly compiled library and make a small trace with it; return 0 if the trace is correct. Run it in a
    subprocess: a faulty library may crash."""
    fault = _find_fault(*_opened(Path(path)))
    if fault:
        print(fault, file=sys.stderr)
    return int(bool(fault))


def _opened(path: Path) -> tuple[Library, Ops]:
    ops = Ops()
    known_original(torch.nn.Module._call_impl)  # reads a source file: once, before processes fork
    return Library(path, ops.describe, lambda tensor: not has_no_data(type(tensor))), ops


def settle() -> None:
    """Restore dispatch state left by a trace that ended elsewhere: in another thread, or in an autograd hook, after
    which autograd restores the keys it had saved."""
    if is_recorded() and not isinstance(loaded := load(), Unavailable) and loaded[0].listener is None:
        loaded[0].thread(0)


def make_tracer(options: TraceOptions) -> NativeTracer:
    """Return a tracer with the recorder, whose availability ``hashbench.core.trace.tracer.choose`` has checked."""
    loaded = load()
    assert not isinstance(loaded, Unavailable)
    return NativeTracer(options, *loaded)


def _find_fault(library: Library, ops: Ops) -> str:
    """Return what is wrong with a small trace made by the recorder; ``""`` if nothing is."""
    first, second = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    tracer = NativeTracer(TraceOptions(), library, ops)
    with tracer:
        third = torch.add(first, second, alpha=2)
        third.mul_(2)
        part = third.t()[1]
    tracer.raw.add_result("part", part)
    trace, _ = tracer.finish()
    seen = [(record.op, record.arguments, [ref.source for ref in record.inputs]) for record in trace.records]
    written = [[output.value for output in record.outputs] for record in trace.records]
    leaves, added = ["other/#0", "other/#1"], "forward//aten.add.Tensor#0"
    multiplied = "forward//aten.mul_.Tensor#0"
    if seen != [
        ("aten.add.Tensor", "alpha=2", leaves),
        ("aten.mul_.Tensor", "2", [added]),
        ("aten.t.default", "", [multiplied]),
        ("aten.select.int", "0, 1", [multiplied]),
    ]:
        return f"a trace of four ops holds {shorten(str(seen), 200)}"
    if written != [[digest(third / 2).value], [digest(third).value], [], []]:
        return "its digests are not those of the tensors"
    return ""
