"""What ``within_rounding`` says of the kernels in ``models/kernels``, half of which are wrong.

``python -m benchmarks.kernels [KERNEL …]`` prints the score, and each verdict that is not as the table expects. Beside
it are two tests that are in use: ``torch.testing.assert_close`` with its defaults, and "the largest error is at most
four times the reference's".
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import torch

from hashbench.core.run.wide import WideMode
from hashbench.core.trace.arguments import tensors_in
from hashbench.extensions.kernels.check import within_rounding
from hashbench.extensions.kernels.verdict import KernelOutcome, RoundingVerdict

FOLDER = Path(__file__).parents[1] / "models" / "kernels"

HELD_OUT = FOLDER / "held_out"
"""Kernels that nobody had read while the judge was written, and none of its figures was chosen by."""

TIMES = 4
"""Of the reference's largest error, that the second baseline allows."""

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel in one dtype.

    Attributes:
        folder: of the table.
        kernel: name of the file.
        dtype: that floating-point inputs are cast to.
        fault: given to ``make_kernel``; empty: as written first.
        outcome: ``right`` or ``wrong``.
        subtle: whether the inputs as they are show nothing, or little.
        kind: right kinds of the fault, with ``|`` between them; empty: not checked.
        where: texts of which one is in the place; empty: not checked.
        backward: whether gradients are compared too.
        note: what is special about it.
    """

    folder: Path
    kernel: str
    dtype: str
    fault: str
    outcome: str
    subtle: bool
    kind: str
    where: str
    backward: bool
    note: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kernel, self.fault or "as written", self.dtype)))


@dataclass(frozen=True, slots=True)
class Case:
    """A row with its kernel.

    Attributes:
        make_kernel: makes the kernel without what it kept from earlier calls.
        reference: plain torch.
        inputs: in the dtype of the row.
        backward: whether gradients are compared too.
    """

    make_kernel: Callable[[], Kernel]
    reference: Kernel
    inputs: tuple[torch.Tensor, ...]
    backward: bool

    def given(self) -> tuple[torch.Tensor, ...]:
        """Return the inputs as new tensors."""
        return tuple(x.clone() for x in self.inputs)


def corpus(folder: Path = FOLDER) -> list[Row]:
    """Return the table of a folder, a row for each dtype."""
    with (folder / "kernels.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    return [
        Row(
            folder,
            line["kernel"],
            dtype,
            line["fault"],
            line["outcome"],
            bool(line["subtle"]),
            line["kind"],
            line["where"],
            bool(line["backward"]),
            line["note"],
        )
        for line in lines
        for dtype in line["dtypes"].split("|")
    ]


def loaded(folder: Path, kernel: str) -> ModuleType:
    """Return the file of a kernel as a module."""
    specification = importlib.util.spec_from_file_location(f"{folder.name}_{kernel}", folder / f"{kernel}.py")
    if specification is None or specification.loader is None:
        raise FileNotFoundError(f"{folder} has no {kernel}.py")
    module = importlib.util.module_from_spec(specification)
    sys.path[:0] = (str(folder), str(FOLDER))
    try:
        specification.loader.exec_module(module)
    finally:
        for each in (folder, FOLDER):
            sys.path.remove(str(each))
        sys.modules.pop("_kernels", None)
    return module


def case(row: Row) -> Case:
    """Return the kernel, the reference and the inputs of a row."""
    module = loaded(row.folder, row.kernel)
    dtype = getattr(torch, row.dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in module.inputs())
    return Case(lambda: module.make_kernel(row.fault), module.reference, inputs, row.backward)


def results(function: Kernel, inputs: Sequence[torch.Tensor], backward: bool) -> list[torch.Tensor]:
    """Return all results, and with ``backward`` the gradients of the floating-point inputs."""
    if not backward:
        with torch.no_grad():
            return tensors_in(function(*inputs))
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = tensors_in(function(*inputs))
    leaves = [x for x in inputs if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, cotangents))]


def is_close(asked: Case) -> bool:
    """Say whether ``assert_close`` accepts the kernel."""
    try:
        got = results(asked.make_kernel(), asked.given(), asked.backward)
        torch.testing.assert_close(got, results(asked.reference, asked.given(), asked.backward))
    except AssertionError:
        return False
    return True


def is_as_good(asked: Case) -> bool:
    """Say whether no result is further from float64 than four times what the reference's own is."""
    got, own = (results(f, asked.given(), asked.backward) for f in (asked.make_kernel(), asked.reference))
    with WideMode():
        wide = [x.double() if x.is_floating_point() else x for x in asked.given()]
        exact = results(asked.reference, wide, asked.backward)

    def largest(values: torch.Tensor, truth: torch.Tensor) -> float:
        return float((values.double() - truth.double()).abs().amax()) if values.numel() else 0.0

    if [(x.shape, x.dtype) for x in got] != [(x.shape, x.dtype) for x in own]:
        return False
    return all(largest(g, e) <= TIMES * largest(o, e) for g, o, e in zip(got, own, exact, strict=True))


@dataclass(frozen=True, slots=True)
class Scored:
    """What was found for one row; ``None``: not asked.

    Attributes:
        row: of the table.
        verdict: of ``within_rounding``.
        seconds: how long that took.
        assert_close: whether it accepts the kernel.
        four_times: whether the largest error is at most four times the reference's.
    """

    row: Row
    verdict: RoundingVerdict
    seconds: float
    assert_close: bool
    four_times: bool

    @property
    def right(self) -> bool:
        """Whether the verdict is right."""
        expected = KernelOutcome.WRONG if self.row.outcome == "wrong" else KernelOutcome.WITHIN_ROUNDING
        return self.verdict.outcome is expected

    @property
    def kind(self) -> bool | None:
        """Whether the kind of the fault that leads is right."""
        if not (self.row.kind and self.right):
            return None
        return self.verdict.faults[0].kind.value in self.row.kind.split("|")

    @property
    def where(self) -> bool | None:
        """Whether the place of the fault that leads is right."""
        if not (self.row.where and self.right):
            return None
        return any(text in self.verdict.faults[0].where for text in self.row.where.split("|"))

    def missed(self) -> str:
        """Return what is wrong, and what was said; empty: nothing."""
        wrong = [name for name in ("right", "kind", "where") if getattr(self, name) is False]
        if not wrong:
            return ""
        said = f"{self.verdict.outcome.value} {self.verdict.reason}".strip()
        if self.verdict.faults:
            first = self.verdict.faults[0]
            said += f": {first.kind.value} under {first.variation} in {first.output}, {first.where or 'everywhere'}"
            said += f", {first.detail}"
        expected = ", ".join(filter(None, (self.row.outcome, self.row.kind, self.row.where)))
        return f"{self.row}: {wrong[0]}: {said}; expected {expected}; {self.row.note}"


def scored(rows: Iterable[Row]) -> Iterator[Scored]:
    """Judge the kernel of each row."""
    for row in rows:
        asked = case(row)
        began = monotonic()
        try:
            verdict = within_rounding(asked.make_kernel(), asked.reference, *asked.given(), backward=asked.backward)
        except Exception as error:  # a crash is a miss of this row, not the end of the score
            verdict = RoundingVerdict(KernelOutcome.NOT_KNOWN, f"raised {type(error).__name__}: {error}")
        seconds = monotonic() - began
        yield Scored(row, verdict, seconds, is_close(asked), is_as_good(asked))


def share(values: Iterable[bool | None]) -> str:
    """Return how many are right, of those that were asked."""
    asked = [value for value in values if value is not None]
    return f"{sum(asked)} of {len(asked)}" + (f" ({sum(asked) / len(asked):.1%})" if asked else "")


def report(found: Sequence[Scored]) -> str:
    """Return the score as text."""
    right = [each for each in found if each.row.outcome == "right"]
    wrong = [each for each in found if each.row.outcome == "wrong"]
    subtle = [each for each in wrong if each.row.subtle]
    seconds = sorted(each.seconds for each in found)
    lines = [
        f"{'':24} {'within_rounding':20} {'assert_close':20} four times the reference's",
        *(
            f"{name:24} {share(each.right for each in group):20} "
            f"{share(each.assert_close is accepts for each in group):20} "
            f"{share(each.four_times is accepts for each in group)}"
            for name, group, accepts in (
                ("right accepted", right, True),
                ("wrong found", wrong, False),
                ("subtle ones found", subtle, False),
            )
        ),
        f"{'not known':24} {sum(each.verdict.outcome is KernelOutcome.NOT_KNOWN for each in found)}",
        f"{'kind named':24} {share(each.kind for each in wrong)}",
        f"{'place named':24} {share(each.where for each in wrong)}",
    ]
    if seconds:
        lines.append(
            f"{'seconds of a verdict':24} median {statistics.median(seconds):.2f}, "
            f"95 % {seconds[int(0.95 * len(seconds))]:.2f}, largest {seconds[-1]:.2f}"
        )
    return "\n".join(lines)


def table(found: Iterable[Scored]) -> Iterator[list[Any]]:
    """Return a line for each row, after one of names."""
    names = [field.name for field in fields(Row) if field.name not in ("folder", "note")]
    yield [*names, "verdict", "kind_found", "where_found", "variation", "seconds", "assert_close", "four_times"]
    for each in found:
        faults = each.verdict.faults
        leading = (faults[0].kind.value, faults[0].where, faults[0].variation) if faults else ("", "", "")
        yield [
            *(getattr(each.row, name) for name in names),
            each.verdict.outcome.value,
            *leading,
            f"{each.seconds:.2f}",
            each.assert_close,
            each.four_times,
        ]


def large() -> Iterator[str]:
    """Judge right kernels of 1,024 x 1,024 elements, and say how long it took."""
    length = 1024
    x, y = (torch.randn(length, length, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    weight, bias = 1 + 0.3 * y[0], 0.3 * y[1]

    def softmax(x: torch.Tensor) -> torch.Tensor:
        powers = torch.exp(x.float() - x.float().amax(-1, keepdim=True))
        return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)

    def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return (centred * scale * weight.float() + bias.float()).to(x.dtype)

    def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return (x[:, :half].float() @ y[:half].float() + x[:, half:].float() @ y[half:].float()).to(x.dtype)

    references: dict[str, tuple[Kernel, Kernel, tuple[torch.Tensor, ...]]] = {
        "softmax": (softmax, lambda x: torch.softmax(x, -1), (x,)),
        "layer_norm": (
            layer_norm,
            lambda x, weight, bias: torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias),
            (x, weight, bias),
        ),
        "matmul": (matmul, torch.matmul, (x, y)),
    }
    for (name, (kernel, reference, inputs)), dtype in itertools.product(
        references.items(), (torch.float32, torch.bfloat16)
    ):
        began = monotonic()
        verdict = within_rounding(kernel, reference, *(each.to(dtype) for each in inputs))
        yield f"{name} {verdict.dtype} of 1,024 x 1,024: {verdict.outcome.value}, {monotonic() - began:.1f} s"


def main() -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__, allow_abbrev=False)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="of the folder; without: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="with a kernels.csv; default: models/kernels")
    parser.add_argument("--csv", type=Path, help="write a line for each row to this file")
    parser.add_argument("--every", type=int, default=1, help="of so many rows one")
    parser.add_argument("--quiet", action="store_true", help="print the score alone")
    parser.add_argument("--large", action="store_true", help="time three kernels of 1,024 x 1,024 elements instead")
    asked = parser.parse_args()
    if asked.large:
        for line in large():
            print(line, flush=True)
        return
    torch.set_num_threads(1)
    rows = [row for row in corpus(asked.folder) if not asked.kernels or row.kernel in asked.kernels][:: asked.every]
    found: list[Scored] = []
    with asked.csv.open("w", encoding="utf-8", newline="") if asked.csv else nullcontext() as file:
        for each in scored(rows):
            found.append(each)
            if not asked.quiet and (text := each.missed()):
                print(text, flush=True)
            if file:
                csv.writer(file, lineterminator="\n").writerows(itertools.islice(table([each]), len(found) > 1, None))
                file.flush()
    print(report(found))


if __name__ == "__main__":
    main()
