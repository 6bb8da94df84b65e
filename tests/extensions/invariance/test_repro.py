"""The folder of a kernel in two batches: written, and run in a fresh process."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.core.diagnose import fresh_process
from hashbench.core.diagnose.repro.writer import SCRIPT_FILE
from hashbench.core.errors import HashbenchError
from hashbench.core.records import Decision
from hashbench.core.run.settings import preserved
from hashbench.extensions.invariance.call_pair import CallPair
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.judged import JudgedCall, RowEffect
from hashbench.extensions.invariance.layout import Cut, ItemAxis, ItemSubset
from hashbench.extensions.invariance.match import Agreement, CallRows, Match, TensorRows
from hashbench.extensions.invariance.repro import run_item_repro, write_item_repro, write_part_repro

FIRST = ItemAxis(0)
DECISION = Decision("batch_coupling", "proven", "12 of 12 with different content", "Do otherwise.")


def call_of(func: object, *args: object) -> ItemCall:
    return ItemCall(func, args, {}, 4, (FIRST,), (FIRST,))  # type: ignore[arg-type]


@pytest.mark.slow
def test_coupling_shows_with_torch_alone(tmp_path: Path) -> None:
    call = call_of(torch.ops.aten._softmax.default, torch.rand(4, 3), 0, False)
    write_item_repro(tmp_path, call, DECISION, seen_in="the model scaler")
    text = (tmp_path / SCRIPT_FILE).read_text(encoding="utf-8")

    assert "hashbench" not in text.partition('"""\n\nimport')[2]
    assert "return torch.ops.aten._softmax.default(t[0], 0, False)" in text
    assert run_item_repro(tmp_path, timeout=120) == "in a fresh process 1 of 1 items differ between 4 items and 4"


@pytest.mark.slow
def test_rows_as_long_as_the_batch_use_copies_of_an_item(tmp_path: Path) -> None:
    rows = torch.rand(4, 3)
    call = ItemCall(torch.ops.aten.mm.default, (rows, rows.T.clone()), {}, 4, (FIRST, ItemAxis(1)), (FIRST,))
    write_item_repro(tmp_path, call, DECISION, chosen=range(2))

    assert run_item_repro(tmp_path, timeout=120) == "in a fresh process 1 of 1 items differ between 4 items and 4"


@pytest.mark.slow
def test_a_kernel_that_writes_in_place_is_compared_by_what_it_wrote(tmp_path: Path) -> None:
    call = call_of(torch.ops.aten.add_.Tensor, torch.rand(4, 3), 1.0)
    write_item_repro(tmp_path, call, DECISION, chosen=range(2))

    assert run_item_repro(tmp_path, timeout=120) == "in a fresh process 0 of 2 items differ between 2 items and 4"


@pytest.mark.slow
@pytest.mark.parametrize("normal", [True, False])
def test_generator_argument_starts_both_calls_alike(tmp_path: Path, *, normal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    op = torch.ops.aten.randn.generator if normal else torch.ops.aten.rand.generator
    call = ItemCall(op, ([8, 6],), {"generator": generator}, 8, (), (FIRST,), scaled=(0,))
    write_item_repro(tmp_path, call, DECISION, chosen=range(4))

    differing, of, *_ = run_item_repro(tmp_path, timeout=120).removeprefix("in a fresh process ").split()
    assert (int(differing) > 0, of) == (normal, "of")


@pytest.mark.slow
def test_the_default_generator_begins_both_calls_in_one_state(tmp_path: Path) -> None:
    call = ItemCall(torch.ops.aten.rand_like.default, (torch.rand(4, 3),), {}, 4, (FIRST,), (FIRST,))
    write_item_repro(tmp_path, call, DECISION, chosen=range(2))

    assert run_item_repro(tmp_path, timeout=120) == "in a fresh process 0 of 2 items differ between 2 items and 4"


@pytest.mark.slow
def test_the_same_items_at_other_places_are_compared_item_by_item(tmp_path: Path) -> None:
    call = call_of(torch.ops.aten.cumsum.default, torch.rand(4, 3) + 1, 0)
    write_item_repro(tmp_path, call, DECISION, chosen=[3, 2, 1, 0])

    assert (
        run_item_repro(tmp_path, timeout=120)
        == "in a fresh process 4 of 4 items differ between two orders of the same items"
    )


@pytest.mark.slow
def test_it_runs_in_a_fork_of_a_server_that_has_loaded_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hashbench.core.processes.run", None)
    call = call_of(torch.ops.aten._softmax.default, torch.rand(4, 3), 0, False)
    write_item_repro(tmp_path, call, DECISION)
    loaded = (
        "import sys; print([name for name in sys.modules if name.startswith(('torchvision', 'hashbench.core.trace.'))])"
    )
    with fresh_process.served(fresh_process.TORCH_ALONE, at_once=False):
        assert run_item_repro(tmp_path, timeout=120) == "in a fresh process 1 of 1 items differ between 4 items and 4"
        assert fresh_process.run_python(loaded, seconds=120).stdout == "['hashbench.core.trace.file']\n"
        (tmp_path / SCRIPT_FILE).write_text("1 / 0")
        assert run_item_repro(tmp_path, timeout=120) == "failed: ZeroDivisionError: division by zero"


def test_what_torch_alone_does_not_have_has_no_repro(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="torch alone does not have it"):
        write_item_repro(tmp_path / "repro", call_of(torch.neg, torch.rand(4, 3)), DECISION, chosen=range(1))
    assert not (tmp_path / "repro").exists()


# ------------------------------------------------------------------------------------------- what depends on each other


def said_by(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``repro.py`` prints at last, in this process, and its exit code."""
    with preserved(), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / SCRIPT_FILE), run_name="__main__")
    return f"{capsys.readouterr().out.splitlines()[-1]} ({ended.value.code})"


WATCHED = {
    "the last of all": (
        torch.rand(2, 6, 3) + 1,
        ItemAxis(1, inner=1),
        6,
        5,
        "the same token differs between 1 token and 6 (1)",
    ),
    "the first half": (
        torch.rand(2, 6, 3) + 1,
        ItemAxis(1, inner=3),
        2,
        0,
        "the same 3 tokens are equal between 3 tokens and 6 (0)",
    ),
    "the last half": (
        torch.rand(2, 6, 3) + 1,
        ItemAxis(1, inner=3),
        2,
        1,
        "the same 3 tokens differ between 3 tokens and 6 (1)",
    ),
    "scores": (
        torch.rand(2, 6, 6) + 1,
        ItemAxis(1, inner=3, also=(2,)),
        2,
        1,
        "the same 3 tokens differ between 3 tokens and 6 (1)",
    ),
}


@pytest.mark.parametrize(("x", "axis", "items", "watched", "said"), WATCHED.values(), ids=WATCHED)
def test_the_tokens_are_compared_that_both_runs_have(
    x: torch.Tensor, axis: ItemAxis, items: int, watched: int, said: str, tmp_path: Path, capsys: Any
) -> None:
    call = ItemCall(torch.ops.aten.cumsum.default, (x, 1), {}, items, (axis,), (axis,), watched=watched)
    write_part_repro(tmp_path, call, DECISION, sizes=(6 // items, 6))
    assert said_by(tmp_path, capsys) == said


def pair_of(first: int, match: Match, *, flat: bool = False) -> CallPair:
    """The sums of the last three of five tokens, of two sequences, and those of the five."""
    subset = ItemSubset(5, 3, first, together=True)
    whole = torch.rand(2, 5, 4)
    part = whole[:, first : first + 3].contiguous()
    change = torch.ops.aten.cumsum.default
    dim = 0 if flat else 1
    calls = [
        ItemCall(change, (x.reshape(-1, 4) if flat else x, dim), {}, items, (None,), ())
        for x, items in ((whole, 5), (part, 3))
    ]
    rows = [TensorRows("float32", tuple(call.tensors[0].shape), Cut(dim)) for call in calls]
    noted = [CallRows((("0", one),), (one,)) for one in rows]
    judged = JudgedCall(
        RowEffect.ORIGIN, "there", {"0": Match(Agreement.SAME, match.sizes, frozenset({2 if flat else 1}))}, (match,)
    )
    return CallPair(calls[0], calls[1], subset, judged, (noted[0], noted[1]), (0,))


def test_both_calls_as_they_were_are_compared_where_the_tokens_begin(tmp_path: Path, capsys: Any) -> None:
    for first, verb in ((0, "are equal"), (2, "differ")):
        pair = pair_of(first, Match(Agreement.DIFFERENT, (5, 3)))
        write_part_repro(tmp_path, pair, DECISION, sizes=(3, 5))
        assert said_by(tmp_path, capsys) == f"the same 3 tokens {verb} between 3 tokens and 5 ({int(first > 0)})"
    write_part_repro(tmp_path, pair_of(0, Match(Agreement.DIFFERENT, (10, 6)), flat=True), DECISION, sizes=(3, 5))
    assert said_by(tmp_path, capsys).startswith("the same 3 tokens differ"), "of the second sequence"
    assert "PARTS = [((0, 2, 0, 3),)]" in (tmp_path / SCRIPT_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("match", "why"),
    [
        (Match(Agreement.UNKNOWN, (5, 3)), "which of its rows are the other run's is not known"),
        (Match(Agreement.SAME, (5, 3)), "nothing that it leaves can be compared"),
        (Match(Agreement.DIFFERENT, (5, 2)), "its rows have other sizes in the other batch"),
    ],
)
def test_where_it_cannot_be_told_what_to_compare_the_reason_is_said(match: Match, why: str, tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match=why):
        write_part_repro(tmp_path / "repro", pair_of(0, match), DECISION, sizes=(3, 5))
    assert not (tmp_path / "repro").exists()
