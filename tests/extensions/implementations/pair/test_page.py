"""The page of two implementations: two columns, joined by lines."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

from hashbench.core.finding.page import as_html
from hashbench.extensions.implementations.pair.finding import finding_of
from hashbench.extensions.implementations.pair.page import MOST_ROWS, ColumnBlock, blocks_of, figures_of
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, OpPlace, PairOutcome, PartedPlace
from tests.extensions.implementations.pair.verdicts import VERDICTS


def verdict(a: str, b: str, joined: str, *, parted: tuple[str, str] | None = None) -> ImplementationsVerdict:
    """Columns of ops ``name:module`` and pairs ``a-b``, each separated by spaces."""
    columns = tuple(
        tuple((name, f"aten.{name}.default{' in ' * bool(module)}{module}")
              for name, _, module in (word.partition(":") for word in column.split()))
        for column in (a, b)
    )  # fmt: skip
    pairs = tuple((one, other) for one, _, other in (word.partition("-") for word in joined.split()))
    places = () if parted is None else (PartedPlace(*(OpPlace("op", ids=(name,)) for name in parted)),)
    return ImplementationsVerdict(PairOutcome.MISTAKE, parted=places, columns=columns, joined=pairs)


def texts(block: ColumnBlock) -> list[tuple[str, str]]:
    sides = ([op.text.split(".")[1] if op else "" for op in column] for column in (block.left, block.right))
    return list(zip(*sides, strict=True))


def test_joined_ops_stand_beside_each_other_and_others_between_them() -> None:
    (block,) = blocks_of(verdict("p q r s", "k m n", "p-k s-n"))
    assert texts(block) == [("p", "k"), ("q", "m"), ("r", ""), ("s", "n")]
    assert [(line.left, line.right) for line in block.lines] == [(0, 0), (3, 3)]
    assert block.counts == ("2 of 4", "2 of 3")


def test_ops_in_another_order_are_joined_by_lines_that_cross() -> None:
    (block,) = blocks_of(verdict("p q r", "k m n", "p-m q-k r-n"))
    lines = {(block.left[line.left].text[5], block.right[line.right].text[5]) for line in block.lines}  # type: ignore[union-attr]
    assert lines == {("p", "m"), ("q", "k"), ("r", "n")}
    assert sum(line.left != line.right for line in block.lines) == 1


def test_parts_are_joined_with_their_whole() -> None:
    (block,) = blocks_of(verdict("q k v", "qkv", "q-qkv k-qkv v-qkv"))
    assert len(block.lines) == 3
    assert [op.kind for op in block.left if op] == ["joined"] * 3


def test_the_first_parting_is_marked_on_both_sides_and_its_block_alone_is_open() -> None:
    a, b = (" ".join(f"{side}{n}:model.layers.{n // 4}.mlp" for n in range(16)) for side in "ab")
    joined = " ".join(f"a{n}-b{n}" for n in range(8))
    blocks = blocks_of(verdict(a, b, joined, parted=("a9", "b8")))
    assert [block.title.split(" / ")[0] for block in blocks] == [f"model.layers.{n}" for n in range(4)]
    assert [block.shown for block in blocks] == [block.first for block in blocks] == [False, False, True, False]
    assert [(one, other) for one, other in texts(blocks[2]) if one == "a9"] == [("a9", "b8")]
    assert [line.kind for line in blocks[2].lines] == ["first"]


def test_a_thousand_ops_without_modules_are_cut() -> None:
    a, b = (" ".join(f"{side}{n}" for n in range(1000)) for side in "ab")
    blocks = blocks_of(verdict(a, b, " ".join(f"a{n}-b{n}" for n in range(0, 1000, 2))))
    assert [len(block.left) for block in blocks] == [MOST_ROWS] * 16 + [40]
    assert sum(len(block.lines) for block in blocks) == 500
    assert not any(block.shown for block in blocks)


def test_ids_that_no_column_has_are_left_out() -> None:
    (block,) = blocks_of(verdict("p", "k", "p-k p-x y-k", parted=("z", "z")))
    assert (len(block.lines), block.first) == (1, False)


class Parser(HTMLParser):
    """Collects tags, and what they load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href", "style") or name.startswith("on")]


def test_the_page_loads_nothing_and_escapes_names() -> None:
    evil = dataclasses.replace(verdict("<b>:x", "k", "<b>-k"), reason="<script>")
    page = as_html(finding_of(evil), title="hashbench numeric", **figures_of(evil, ("<i>", "b")))
    parser = Parser()
    parser.feed(page)
    assert parser.loads == []
    assert {"script", "b", "i"} & set(parser.tags) <= {"i"}
    assert "aten.&lt;b&gt;.default" in page
    assert "(&lt;i&gt;)" in page
    assert re.search(r"<details[^>]* open>", page)


def test_without_ops_there_are_no_columns() -> None:
    assert figures_of(VERDICTS["not known"]) == {}
