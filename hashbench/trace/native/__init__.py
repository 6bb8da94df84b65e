"""The native tracer: a recorder in C++ sees every call, and Python makes a trace of what it kept.

``ops`` tells the recorder what schemas say, ``tracer`` answers it while a trace is made, ``decode`` reads what it kept.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

from hashbench.native.build import RETRY, TRIAL, Unavailable, build
from hashbench.native.library import Library, is_free, is_recorded
from hashbench.text import one_line, shorten
from hashbench.trace.callbacks import TraceOptions
from hashbench.trace.digest import digest, has_no_data
from hashbench.trace.module_paths import known_original
from hashbench.trace.native.ops import Ops
from hashbench.trace.native.tracer import NativeTracer


@functools.cache
def load() -> tuple[Library, Ops] | Unavailable:
    """The recorder, loaded into this process, and the ops that it has met; or why it cannot be used. Compiles it where
    nobody has."""
    if not is_free():
        return Unavailable(
            f"torch {torch.__version__} leaves no dispatch key free to see calls by", "install torch 2.13 or newer"
        )
    built = build(trial=TRIAL)
    if isinstance(built, Unavailable):
        return built
    try:
        return _opened(built.path)
    except (OSError, AttributeError) as error:
        return Unavailable(f"the native recorder cannot be loaded ({one_line(str(error))})", RETRY)


def trial(path: str) -> int:
    """Load a library that was just compiled and make a small trace with it; 0 where that is as it should be. For a
    process of its own, since what is wrong may end it."""
    fault = _fault(*_opened(Path(path)))
    if fault:
        print(fault, file=sys.stderr)
    return int(bool(fault))


def _opened(path: Path) -> tuple[Library, Ops]:
    ops = Ops()
    known_original(torch.nn.Module._call_impl)  # reads a source: now rather than in each process that is forked later
    return Library(path, ops.describe, lambda tensor: not has_no_data(type(tensor))), ops


def settle() -> None:
    """Take out of force here what a trace left that was ended elsewhere: in another thread, or in a hook of autograd's,
    which puts back the keys that it has found."""
    if is_recorded() and not isinstance(loaded := load(), Unavailable) and loaded[0].listener is None:
        loaded[0].thread(0)


def make_tracer(options: TraceOptions) -> NativeTracer:
    """A tracer with the recorder, which can be used here: ``hashbench.trace.tracer.choose`` has asked."""
    loaded = load()
    assert not isinstance(loaded, Unavailable)
    return NativeTracer(options, *loaded)


def _fault(library: Library, ops: Ops) -> str:
    """What is wrong in a small trace by the recorder; empty where nothing is."""
    first, second = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    tracer = NativeTracer(TraceOptions(), library, ops)
    with tracer:
        third = torch.add(first, second, alpha=2)
        third.mul_(2)
        part = third.t()[1]
    tracer.add_result("part", part)
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
