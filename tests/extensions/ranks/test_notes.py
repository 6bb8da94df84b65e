"""Which calls are captured of a verdict, and the commands that repeat them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core.catalog import Origin
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.notes import (
    CaptureNote,
    NamedCall,
    calls_to_capture,
    guilty_of,
    note_path,
    read_notes,
    write_note,
)
from hashbench.extensions.ranks.verdict import RankDivergence
from tests.core.divergence.rank_runs import rank_traces
from tests.extensions.ranks.rank_traces import traces


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("forward/a/aten.mm.default#0@3", NamedCall("forward/a/aten.mm.default#0", 3)),
        ("forward/a/aten.mm.default#0", NamedCall("forward/a/aten.mm.default#0")),
        ("forward/a@b/aten.mm.default#0", NamedCall("forward/a@b/aten.mm.default#0")),
        ("@1", NamedCall("@1")),
    ],
)
def test_a_call_is_named_by_its_record_and_its_rank(word: str, call: NamedCall) -> None:
    assert NamedCall.of(word) == call
    assert call.word() == word


def test_of_a_kernel_its_call_on_its_rank_is_captured() -> None:
    first, second = traces(3), traces(3, guilty=2, run=1)
    found = guilty_of(find_across_ranks(first, second))

    assert found is not None
    assert calls_to_capture(found, first) == (NamedCall(found.node, 2),)
    assert "aten.mul.Tensor" in found.node
    assert guilty_of(find_across_ranks(first, first)) is None


def test_of_a_collective_the_calls_of_all_its_ranks_are_captured_in_the_order_of_the_group() -> None:
    run = rank_traces("x = all_reduce !input/0 -> s\nsum x => r\nrank 0:\nrank 1:")
    (node,) = (record.id for record in run[1].records if record.collective)
    found = RankDivergence(Origin.COLLECTIVE, node, "c10d.allreduce_.default", 0, "forward", None, "", "", "", rank=1)

    assert calls_to_capture(found, run) == (NamedCall(node, 0), NamedCall(node, 1))
    assert calls_to_capture(found, {1: run[1]}) == ()


def test_a_message_is_not_captured() -> None:
    run = rank_traces("rank 0:\n    send !input/0 peer=1\nrank 1:\n    x = recv !input/0 peer=0 -> a\n    sum x => r")
    (node,) = (record.id for record in run[1].records if record.collective)
    found = RankDivergence(Origin.COLLECTIVE, node, "c10d.recv_.default", 0, "forward", None, "", "", "", rank=1)

    assert calls_to_capture(found, run) == ()


def test_the_command_of_a_repro(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("a b/repro")

    assert CaptureNote("").command(folder) == "hashbench replay 'a b/repro'"
    assert CaptureNote("", definition="ops").command(Path("r")) == "hashbench replay --import ops r"
    assert CaptureNote("", definition="/x/ops.py").command(Path("r")) == "hashbench replay --import /x/ops.py r"
    assert CaptureNote("", definition=f"{tmp_path}/ops.py").command(Path("r")) == ("hashbench replay --import ops.py r")
    assert CaptureNote("", members=4).command(folder) == "torchrun --nproc-per-node 4 'a b/repro/repro.py'"


def test_notes_are_read_back_and_a_missing_one_is_left_out(tmp_path: Path) -> None:
    note = CaptureNote("3 of 20 replays differ", written=True, definition="ops")
    write_note(tmp_path, 1, note)

    assert note_path(tmp_path, 1).name == "rank1.capture.json"
    assert read_notes(tmp_path, [NamedCall("a", 0), NamedCall("a", 1)]) == [note]
