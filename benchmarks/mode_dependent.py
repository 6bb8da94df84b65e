"""Which ops torch computes by another formula because a dispatch mode is active.

``python -m benchmarks.mode_dependent`` runs torch's own op database (needs ``pip install expecttest``; ten minutes)
with no mode, under a mode that does nothing and under the Python tracer, with and without gradients, and compares
values and gradients bit by bit. What differs is repeated, so that nondeterminism is not mistaken for it. Where the mode
alone makes the difference, experiments find the *recorded* op behind it, and the table that
``hashbench/core/trace/op_schema.py`` reads is written; a call that the native tracer changes, too, makes the exit code
1. Three mechanisms are told apart:

* ``conjugate``: during a call that a mode intercepted, torch leaves out its own handling of lazily conjugated views, so
  a composite kernel multiplies the view where it otherwise multiplies a copy. Switching that handling on again
  (:class:`Restoring`) removes the difference; leaving it off for one op at a time names the op.
* ``branch``: a derivative asks whether a mode is active (``isTensorSubclassLike`` in torch's C++). The mode is made
  active during one autograd node at a time, which names the node and, by the trace, its forward op.
* ``composite``: a function asks the same before it calls any op, so that no op is recorded for it, only what it calls.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hashbench.core.records import Trace
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.digest import raw_digest

TABLE = Path(__file__).parent.parent / "hashbench" / "data" / "mode_dependent_ops.csv"
DTYPES = (torch.float32, torch.float64, torch.complex64)
NOTES = {
    "conjugate": "its composite kernel meets conjugated views that are not resolved under a mode",
    "branch": "its derivative takes a formula without in-place and data-dependent steps under a mode",
    "composite": "the function that calls it takes another way under a mode",
}
SHAPES: Mapping[str, tuple[tuple[tuple[int, ...], ...], ...]] = {
    "matmul": (
        ((8, 1, 96), (1, 96, 32)),
        ((8, 64, 96), (1, 96, 1)),
        ((1, 64, 96), (8, 96, 5)),
        ((1, 1, 96), (8, 96, 32)),
    ),
    "linalg.svdvals": (((64, 64),),),
    "linalg.eigvalsh": (((64, 64),),),
}
_LEFT_OUT = ("Conjugate", "Negative", "ZeroTensor")


@dataclass(frozen=True, order=True)
class Finding:
    """One recorded op whose formula depends on a mode.

    ``phase`` is ``backward`` for its derivative, ``any`` for itself, ``no gradient`` for itself where no derivative of
    it is computed. ``signature`` are the records, in a row, of which it is one, where the formula was chosen before any
    of them was called; empty where the op says enough.
    """

    op: str
    phase: str
    mechanism: str
    signature: str = ""


class NoOp(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Restoring(NoOp):
    """Does nothing either, and calls every op but ``without`` with torch's handling of lazy views switched on again."""

    def __init__(self, without: str = "") -> None:
        super().__init__()
        self.without = without

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == self.without:
            return super().__torch_dispatch__(func, types, args, kwargs)
        before = {key: torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _LEFT_OUT}
        try:
            for key in _LEFT_OUT:
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            for key, excluded in before.items():
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


# ------------------------------------------------------------------------------------------------- one call


@dataclass(frozen=True)
class Call:
    """One sample of one entry of the op database. Calling it gives the digests of values and gradients."""

    op: Any
    sample: Any
    sign: int = 1  # of the cotangents: a formula may give another sign of zero for one of them

    def __call__(
        self,
        forward: AbstractContextManager[Any],
        backward: AbstractContextManager[Any],
        *,
        before_backward: Callable[[list[Node]], None] = lambda _: None,
    ) -> list[Any]:
        with _disable_current_modes():
            torch.manual_seed(0)
            arguments = tree_map(_fresh, (self.sample.input, self.sample.args, self.sample.kwargs))
        with forward:
            found = self.op(arguments[0], *arguments[1], **arguments[2])
        outputs = [value for value in tree_leaves(found) if isinstance(value, torch.Tensor) and value.requires_grad]
        with _disable_current_modes():
            digests = [_bits(value) for value in tree_leaves(found)]
            cotangents = [torch.randn(value.shape).mul_(self.sign).to(value.dtype) for value in outputs]
        if outputs:
            before_backward(_nodes(outputs))
            with backward:
                torch.autograd.backward(outputs, cotangents)
        with _disable_current_modes():
            leaves = [value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor)]
            return digests + [_bits(leaf.grad) for leaf in leaves if leaf.grad is not None]

    def under(self, mode: AbstractContextManager[Any] | None = None) -> list[Any]:
        """The digests with ``mode`` active in forward and backward."""
        return self(mode or nullcontext(), mode or nullcontext())

    def traced(self, tracer: str = "python") -> tuple[list[Any], Trace]:
        """The digests under a trace, and the trace."""
        trace = HashDebugTrace(tracer=tracer)
        with trace:
            digests = self(nullcontext(), nullcontext())
        return digests, trace.finish()


def _fresh(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    value = value.detach()
    if value.layout is not torch.strided:
        return raw_digest(value)
    plain = value.resolve_conj().resolve_neg()
    return raw_digest(torch.empty(plain.shape, dtype=plain.dtype).copy_(plain))


def _nodes(outputs: list[torch.Tensor]) -> list[Node]:
    """All autograd nodes behind the outputs, in the order of a breadth-first walk."""
    found = dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None)
    for node in (queue := list(found)):
        for following, _ in node.next_functions:
            if following is not None and following not in found:
                found[following] = None
                queue.append(following)
    return list(found)


# -------------------------------------------------------------------------------------------- which op it was


def differs_by_mode(call: Call) -> str:
    """``""`` where no mode changes the result, ``"yes"`` where one does, else why that is not known."""
    plain, moded, (traced, _) = call.under(), call.under(NoOp()), call.traced()
    if plain == moded == traced:
        return ""
    if any(call.under() != plain for _ in range(2)) or any(call.under(NoOp()) != moded for _ in range(2)):
        return "differs between equal calls"
    if call.traced()[0] != traced:
        return "differs between two traces"
    return "yes" if traced == moded else "the trace itself changes it"


def locate(call: Call) -> Iterator[Finding]:
    """The recorded ops by which a mode changed this call."""
    plain, restored = call.under(), call.under(Restoring())
    _, trace = call.traced()
    if restored != call.under(NoOp()):
        for op in sorted({record.op for record in trace.records}):
            if call.under(Restoring(op)) != restored:
                yield Finding(op, "any", "conjugate")
    if plain == restored:
        return
    if call(nullcontext(), Restoring()) != plain:
        yield from _derivatives(call, plain)
    if call(Restoring(), nullcontext()) != plain:
        yield _composite(trace)


def _composite(trace: Trace) -> Finding:
    """A function that chose between formulas before it called what was recorded."""
    forward = [record for record in trace.records if record.phase == "forward"]
    kernels = [record.op for record in forward if record.outputs and not record.blank]
    signature = " ".join(record.op for record in forward) if len(kernels) > 1 else ""
    differentiated = any(record.forward_op for record in trace.records)
    return Finding(kernels[0], "any" if differentiated else "no gradient", "composite", signature)


def _derivatives(call: Call, plain: list[Any]) -> Iterator[Finding]:
    """Makes the mode active during one autograd node at a time."""
    forward_ops = _forward_ops(call)
    for number, op in forward_ops.items():
        if call(nullcontext(), nullcontext(), before_backward=lambda nodes, n=number: _active_in(nodes[n])) != plain:
            yield Finding(op, "backward", "branch")


def _active_in(node: Node) -> None:
    mode = Restoring()
    node.register_prehook(lambda *_: mode.__enter__() and None)
    node.register_hook(lambda *_: mode.__exit__(None, None, None))


def _forward_ops(call: Call) -> Mapping[int, str]:
    """By number of the autograd node: the recorded op whose derivative it is, else the node's own name."""
    trace = HashDebugTrace(tracer="python")
    names: list[str] = []

    def number_records(nodes: list[Node]) -> None:
        names.extend(node.name() for node in nodes)
        for number, node in enumerate(nodes, start=1):  # iteration 0 is the forward
            node.register_prehook(lambda *_, n=number: setattr(trace, "iteration", n))

    with trace:
        call(nullcontext(), nullcontext(), before_backward=number_records)
    found = dict(enumerate(names))
    for record in trace.finish().records:
        if record.iteration and record.forward_op:
            found[record.iteration - 1] = record.forward_op.rpartition("/")[2].partition("#")[0]
    return found


# ------------------------------------------------------------------------------------------- the whole database


NATIVE = Finding("", "", "native")
"""Instead of an op: the native tracer changes a call, too."""


def measure(names: set[str], *, seconds: float) -> dict[tuple[Finding, str], set[str]]:
    """Findings by kind of dtype, with the entries of the database that showed them; among them :data:`NATIVE`.

    Each entry, dtype and grad mode gets so many seconds.
    """
    seen: dict[tuple[Finding, str], set[str]] = {}
    for op in op_db:
        if op.name not in names:
            continue
        for dtype in DTYPES:
            for gradients in (True, False):
                for finding in _of_op(op, dtype, gradients=gradients, seconds=seconds):
                    kind = "complex" if dtype.is_complex else "real"
                    seen.setdefault((finding, kind), set()).add(op.name)
    return seen


def _of_op(op: Any, dtype: torch.dtype, *, gradients: bool, seconds: float) -> set[Finding]:
    supported = op.supported_backward_dtypes("cpu") if gradients else op.supported_dtypes("cpu")
    if dtype not in supported or (gradients and not op.supports_autograd):
        return set()
    found: set[Finding] = set()
    deadline = time.monotonic() + seconds
    torch.manual_seed(0)
    # A sample that torch itself cannot differentiate or build is of no use here.
    with contextlib.suppress(RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError):
        for sample in itertools.chain(
            _more_samples(op.name, dtype, gradients=gradients),
            op.sample_inputs("cpu", dtype, requires_grad=gradients),
        ):
            if time.monotonic() > deadline:
                break
            with contextlib.suppress(RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError):
                for sign in (1, -1) if gradients else (1,):
                    found |= _of_sample(Call(op, sample, sign), f"{op.name} {dtype} gradients={gradients}")
    return found


def _more_samples(name: str, dtype: torch.dtype, *, gradients: bool) -> Iterator[SampleInput]:
    """Larger ones, where those of the database are too small to show what the formulas make of rounding."""
    for shapes in SHAPES.get(name, ()):
        first, *others = (torch.randn(shape, dtype=dtype).requires_grad_(gradients) for shape in shapes)
        yield SampleInput(first, args=tuple(others))


def _of_sample(call: Call, label: str) -> set[Finding]:
    answer = differs_by_mode(call)
    if answer != "yes":
        if answer:
            print(f"{label}: {answer}", file=sys.stderr)
        return set()
    found = set(locate(call))
    print(f"{label}: {sorted(found) or 'a mode changes it and no recorded op is found'}", file=sys.stderr, flush=True)
    if call.traced("native")[0] != call.under():
        print(f"{label}: the native tracer changes it, too", file=sys.stderr, flush=True)
        found.add(NATIVE)
    return found


def narrowed(seen: Mapping[tuple[Finding, str], set[str]]) -> dict[tuple[Finding, str], set[str]]:
    """A finding with a signature that holds an op which was found alone elsewhere becomes that one."""
    alone = {finding.op: finding for finding, _ in seen if not finding.signature and finding.mechanism == "composite"}
    merged: dict[tuple[Finding, str], set[str]] = {}
    for (finding, kind), names in seen.items():
        known = [alone[op] for op in finding.signature.split() if op in alone]
        merged.setdefault((known[0] if known else finding, kind), set()).update(names)
    return merged


def write(seen: Mapping[tuple[Finding, str], set[str]], path: Path) -> None:
    """The table; one line per recorded op and phase."""
    seen = narrowed(seen)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("op", "phase", "dtypes", "signature", "torch", "seen_in", "note"))
        for finding in sorted({finding for finding, _ in seen}):
            kinds = {kind for other, kind in seen if other == finding}
            names = sorted(set().union(*(seen[finding, kind] for kind in kinds)))
            dtypes = "any" if "real" in kinds else "complex"
            note = NOTES[finding.mechanism]
            lines.writerow(
                (finding.op, finding.phase, dtypes, finding.signature, torch.__version__, " ".join(names), note)
            )


def main() -> int:
    """Measure, and write the table; 1 where the native tracer changes something, too."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.mode_dependent", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="for each op, dtype and grad mode (default 2)"
    )
    parser.add_argument(
        "--output", type=Path, default=TABLE, metavar="FILE", help=f"default {TABLE.name} in the package"
    )
    parser.add_argument("--skip", nargs="*", default=[], metavar="OP", help="names to leave out")
    parser.add_argument("only", nargs="*", help="names in the op database (default: all)")
    parsed = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)  # as in a sweep: empty memory is filled
    names = {op.name for op in op_db} if not parsed.only else set(parsed.only)
    seen = measure(names - set(parsed.skip), seconds=parsed.seconds)
    changed = sorted(set().union(*(seen[finding, kind] for finding, kind in seen if finding == NATIVE)))
    write({key: names for key, names in seen.items() if key[0] != NATIVE}, parsed.output)
    print(f"changed by the native tracer: {' '.join(changed) or 'nothing'}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
