"""Where each rank is when the time of a run is over."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hashbench.extensions.ranks.waiting import (
    DEADLINE,
    Whereabouts,
    all_reported,
    begun_and_last,
    flight_recorder,
    telling_at_deadline,
    waiting_words,
    waits_path,
    whereabouts,
)

_GROUPS = {"0": ((0, 1), 0), "5": ((0, 2), 1)}


def _entry(kind: str, number: int, *, group: str = "0", over: bool = True, message: bool = False) -> dict[str, object]:
    numbers = {"collective_seq_id": 0 if message else number, "p2p_seq_id": number if message else 0}
    return {
        "profiling_name": f"gloo:{kind}",
        "process_group": [group, ""],
        "retired": over,
        "is_p2p": message,
        **numbers,
    }


@pytest.mark.parametrize(
    ("entries", "begun", "last"),
    [
        ([], (), ""),
        ([_entry("all_reduce", 1)], (), "all_reduce #1 of group 0-1"),
        (
            [_entry("all_reduce", 1), _entry("barrier", 2, over=False)],
            ("barrier #2 of group 0-1",),
            "all_reduce #1 of group 0-1",
        ),
        ([_entry("recv", 1, over=False, message=True)], ("recv #1 in group 0-1",), ""),
        ([_entry("all_reduce", 1, group="5", over=False)], ("all_reduce #1 of second group 0-2",), ""),
        ([_entry("all_reduce", 1, group="gone", over=False)], ("all_reduce #1",), ""),
    ],
    ids=["none", "ended", "one waits", "a message", "another group", "a group that is gone"],
)
def test_collectives_begun(entries: list[dict[str, object]], begun: tuple[str, ...], last: str) -> None:
    assert begun_and_last(entries, _GROUPS) == (begun, last)


@pytest.mark.parametrize(
    ("where", "begins"),
    [
        (Whereabouts("a.py:1 f", True, ("all_reduce #1",)), "waits in all_reduce #1 (a.py:1 f)"),
        (Whereabouts("a.py:1 f", False, ("all_reduce #1",)), "waits in no collective (a.py:1 f); begun and not ended"),
        (Whereabouts("a.py:1 f", True, ()), "waits in no collective (a.py:1 f); it began none"),
        (Whereabouts("a.py:1 f", True), "is at a.py:1 f; torch does not report"),
        (Whereabouts("", True), "is at no line of the script"),
    ],
    ids=["waits", "goes on behind an asynchronous one", "none", "not known", "no line"],
)
def test_words(where: Whereabouts, begins: str) -> None:
    assert where.words().startswith(begins)


def test_torchs_flight_recorder_has_what_is_read(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(2))
        entries = flight_recorder()
        assert entries is not None, "this torch keeps no list, or names its fields differently"
        assert whereabouts(threading.get_ident()).last.startswith(f"all_reduce #{entries[-1]['collective_seq_id']}")
    finally:
        dist.destroy_process_group()


def test_a_rank_that_leaves_no_note_is_said(tmp_path: Path) -> None:
    waits_path(tmp_path, 0).write_text("[]")
    for sentence in waiting_words(tmp_path, 2):
        assert "does not say where it is" in sentence


def test_a_note_is_written_at_the_deadline_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(DEADLINE, str(time.monotonic() + 600))
    with telling_at_deadline(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(DEADLINE, str(time.monotonic()))
    with telling_at_deadline(tmp_path):
        while not all_reported(tmp_path, 1):
            time.sleep(0.01)
    (sentence,) = waiting_words(tmp_path, 1)
    assert "test_waiting.py" in sentence
