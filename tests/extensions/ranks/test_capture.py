"""One call of this rank, kept while it is recorded, and its repro."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hashbench import HashbenchError, record_ranks
from hashbench.core.diagnose.repro import call_file
from hashbench.core.trace import file
from hashbench.core.trace.step_file import rank_path
from hashbench.extensions.ranks.capture import RankCapture
from hashbench.extensions.ranks.notes import CaptureNote, NamedCall, note_path, read_notes

MULTIPLIED = "forward//aten.mul.Tensor#1"
_CALLS = itertools.count(1)


@torch.library.custom_op("capture_test::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Add another number in each call."""
    return x + next(_CALLS)


def note(folder: Path, rank: int = 0) -> CaptureNote:
    (found,) = read_notes(folder, [NamedCall("", rank)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tracer", ["native", "python"])
def test_the_call_of_a_kernel_is_kept_with_its_place(tracer: str, tmp_path: Path) -> None:
    x = torch.arange(4.0)
    with record_ranks(tmp_path, tracer=tracer, capture=f"{MULTIPLIED}@0"):
        (x * 2.0) * torch.full((4,), 3.0)

    saved = call_file.read(tmp_path / "repro")
    assert (saved.call.op, saved.call.node, saved.call.phase) == ("aten.mul.Tensor", MULTIPLIED, "forward")
    contents = [memory.content.view(torch.float32).tolist() for memory in saved.call.memories]
    assert sorted(contents) == [[0.0, 2.0, 4.0, 6.0], [3.0, 3.0, 3.0, 3.0]]  # by address
    assert note(tmp_path).words.endswith("replays differ (unknown, open)")
    assert note(tmp_path).words.startswith("0 of ")
    assert MULTIPLIED in [record.id for record in file.read(rank_path(tmp_path, 0)).records]


@pytest.mark.slow
def test_a_custom_op_is_replayed_where_it_is_defined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record_ranks(tmp_path, capture=["forward//capture_test.counted.default#0"]):
        counted(torch.ones(2))

    differing, _, trials = note(tmp_path).words.split()[:3]
    assert differing == trials
    assert note(tmp_path).definition == __file__
    command = f"hashbench replay --import {note(tmp_path).definition} {tmp_path}/repro/rank0"
    assert command.rpartition(" ")[2] in capsys.readouterr().err
    assert json.loads((tmp_path / "repro" / "rank0" / "call.json").read_text())["op"] == "capture_test.counted.default"


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        ("forward//aten.mul.Tensor#7@0", "not captured: the call was not made"),
        ("forward//aten.empty.memory_format#0@0", "not captured: it allocates memory, of whose content a replay"),
    ],
)
def test_what_is_not_captured_is_said_in_a_line(
    capture: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with record_ranks(tmp_path, capture=capture):
        torch.empty(3).fill_(1.0)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hashbench: rank 0, {capture[:-2]}: {words}")
    assert not (tmp_path / "repro").exists()


def test_a_call_that_is_named_for_another_rank_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record_ranks(tmp_path, capture=f"{MULTIPLIED}@1"):
        (torch.ones(2) * 2.0) * 3.0

    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.log.gz"]


def test_what_a_rank_gives_to_a_collective_is_saved_by_its_rank_in_the_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with record_ranks(tmp_path, capture="forward//c10d.allreduce_.default#1"):
            dist.all_reduce(torch.zeros(2))
            dist.all_reduce(torch.full((2,), 5.0))
    finally:
        dist.destroy_process_group()

    assert sorted(path.name for path in (tmp_path / "repro").iterdir()) == ["rank0.pt", "repro.py"]
    assert torch.load(tmp_path / "repro" / "rank0.pt", weights_only=True)["arguments"][0][0].tolist() == [5.0, 5.0]
    assert (note(tmp_path).words, note(tmp_path).members) == ("saved its contribution", 1)


def test_the_rank_is_that_of_the_call_also_when_the_program_has_left_its_group(tmp_path: Path) -> None:
    ranks = [1]
    kept = RankCapture([NamedCall("a", 1)], tmp_path, rank=lambda: ranks[-1])
    kept.before("a", torch.ops.aten.empty.memory_format, [[2]], {})
    ranks.append(0)

    kept.write()

    assert note_path(tmp_path, 1).exists()
    assert not note_path(tmp_path, 0).exists()


def test_a_folder_with_a_repro_is_refused(tmp_path: Path) -> None:
    (tmp_path / "repro").mkdir()

    with pytest.raises(HashbenchError, match="repro exists"), record_ranks(tmp_path, capture=MULTIPLIED):
        raise AssertionError("the program was started")
    assert not note_path(tmp_path, 0).exists()
