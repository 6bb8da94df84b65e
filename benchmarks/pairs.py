"""What the comparison of two implementations says of the pairs in ``models/pairs``, whose mistakes are planted.

``python -m benchmarks.pairs [PAIR …]`` prints the score, and each verdict that is not as the table expects.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hashbench.extensions.implementations.pair.check import Side, compare_implementations
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, OpPlace, PairOutcome

FOLDER = Path(__file__).parents[1] / "models" / "pairs"

MOST_OPS = 5
"""Size of a region that still names a place."""

GROUPS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
    "sdpa": ("scaled_dot_product_attention", "scaled_dot_product_flash_attention_for_cpu"),
}
"""Names in the table that stand for several ops."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Attributes:
        pair: name of the file.
        dtype: that both models and inputs are cast to; empty: float32.
        fault: given to ``make_b``; empty: the clean twin.
        outcome: right outcomes, with ``|`` between them.
        module_layer: texts of which one is in the module path or the source line of (b); empty: any.
        op: names of ops (without ``aten.`` and overload), of which one is right; empty: not checked.
        line_fault: the fault in the comments that mark its lines; empty: no line is marked.
        note: what is special about it.
    """

    pair: str
    dtype: str
    fault: str
    outcome: str
    module_layer: str
    op: str
    line_fault: str
    note: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.pair, self.fault or "clean", self.dtype)))

    def ops(self) -> set[str]:
        """Return the bare names of right ops."""
        return {name for op in self.op.split("|") for name in GROUPS.get(op, (op,))}

    def lines(self) -> list[str]:
        """Return the lines of the statements where the fault is marked, as ``file:number``."""
        path = FOLDER / f"{self.pair}.py"
        text = path.read_text(encoding="utf-8")
        marked = [
            number
            for number, line in enumerate(text.splitlines(), 1)
            if self.line_fault and self.line_fault in line.partition("# fault: ")[2].split(", ")
        ]
        spans = [
            range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.stmt) and not hasattr(node, "body")
        ]
        return [f"{path.name}:{n}" for number in marked for span in spans if number in span for n in span]


def corpus() -> list[Row]:
    """Return the table."""
    with (FOLDER / "pairs.csv").open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def loaded(pair: str) -> ModuleType:
    """Return the file of a pair as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(pair)
    finally:
        sys.path.remove(str(FOLDER))


def part(module: ModuleType, name: str, side: str) -> Any:
    """Return a function of one side, or the one of both, or nothing."""
    return getattr(module, f"{name}_{side}", getattr(module, name, None))


def sides(row: Row) -> tuple[Side, Side]:
    """Return both sides of a row."""
    module = loaded(row.pair)
    dtype = getattr(torch, row.dtype or "float32")

    def side(letter: str, make: Callable[[], Any]) -> Side:
        def inputs() -> Any:
            given = part(module, "inputs", letter)()
            return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, given)

        outputs, loss = part(module, "outputs", letter), part(module, "loss", letter)
        return Side(lambda: make().to(dtype), inputs, outputs, loss)

    return side("a", module.make_a), side("b", lambda: module.make_b(row.fault))


def code(source: str) -> str:
    """Return a place of a file of the corpus with the code of its line."""
    name, _, number = source.partition(" ")[0].partition(":")
    path = FOLDER / name
    if not path.is_file() or not number.isdecimal():
        return source
    return f"{name}:{number} {path.read_text(encoding='utf-8').splitlines()[int(number) - 1].strip()}"


def bare(op: str) -> str:
    """Return ``softmax`` of ``aten._softmax.default``."""
    return op.removeprefix("aten.").partition(".")[0].strip("_")


@dataclass(slots=True)
class Scored:
    """What was found for one row; ``None``: not asked."""

    row: Row
    verdict: ImplementationsVerdict
    seconds: float
    layer: bool | None = field(init=False, default=None)
    op: bool | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.row.outcome != "mistake":
            return
        leading = self.verdict.parted[0].b if self.verdict.parted else None
        place = leading or OpPlace("")
        wanted = [text for text in self.row.module_layer.split("|") if text]
        self.layer = (
            bool(leading)
            and self.right
            and (not wanted or any(text in place.module or text in code(place.source) for text in wanted))
        )
        if self.row.op:
            names = place.ops[: MOST_OPS + 1] or (place.op,)
            region = names if len(names) <= MOST_OPS else names[:1]
            at_line = len(names) <= MOST_OPS and any(f"{line} " in f"{place.source} " for line in self.row.lines())
            self.op = self.layer and (at_line or any(bare(name) in self.row.ops() for name in region))

    @property
    def right(self) -> bool:
        """Whether the outcome is right."""
        return self.verdict.outcome.value in self.row.outcome.split("|")

    @property
    def blamed(self) -> bool:
        """Whether a clean pair was called a mistake."""
        return self.verdict.outcome is PairOutcome.MISTAKE and "mistake" not in self.row.outcome

    def missed(self) -> str:
        """Return what is wrong, and what was said; empty: nothing."""
        wrong = [
            name for name, right in (("verdict", self.right), ("layer", self.layer), ("op", self.op)) if right is False
        ]
        if not wrong:
            return ""
        lead = self.verdict.parted[0].b if self.verdict.parted else None
        said = f"{lead.op} in {lead.module!r} at {lead.source!r}, {len(lead.ops)} ops" if lead else "no place in (b)"
        asked = f"{self.row.outcome}, {self.row.op} in {self.row.module_layer!r}"
        return f"{self.row}: {wrong[0]}: {self.verdict.outcome.value} {self.verdict.reason}; {said}; expected {asked}"


def scored(rows: Iterable[Row]) -> Iterator[Scored]:
    """Compare both sides of each row."""
    for row in rows:
        began = monotonic()
        verdict = compare_implementations(*sides(row))
        yield Scored(row, verdict, monotonic() - began)


def share(values: Iterable[bool | None]) -> str:
    """Return how many are right, of those that were asked."""
    asked = [value for value in values if value is not None]
    return f"{sum(asked)} of {len(asked)}" + (f" ({sum(asked) / len(asked):.1%})" if asked else "")


def report(found: list[Scored]) -> str:
    """Return the score as text."""
    clean = [each for each in found if "mistake" not in each.row.outcome]
    seconds = sorted(each.seconds for each in found)
    return "\n".join(
        [
            f"verdict right        {share(each.right for each in found)}",
            f"layer right          {share(each.layer for each in found)}",
            f"op or region <= {MOST_OPS}    {share(each.op for each in found)}",
            f"clean called mistake {sum(each.blamed for each in clean)} of {len(clean)}",
            f"seconds              median {seconds[len(seconds) // 2]:.2f}, largest {seconds[-1]:.2f}",
        ]
    )


def main() -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", description=__doc__, allow_abbrev=False)
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help="of models/pairs; without: all")
    asked = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(1)
    found = []
    for each in scored(row for row in corpus() if not asked.pairs or row.pair in asked.pairs):
        found.append(each)
        if text := each.missed():
            print(text, flush=True)
    print(report(found))


if __name__ == "__main__":
    main()
