"""A rank's file: gzip members, those of one run."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hashbench.core.trace.step_file import member, rank_path, run_id, run_of, without_run

RUN = "0123456789abcdef"


def test_each_text_is_a_member(tmp_path: Path) -> None:
    path = rank_path(tmp_path, 3)
    assert path.name == "rank3.log.gz"
    texts = ["first\n", "", "é" * 1000]
    members = [member(texts[0], RUN), *map(member, texts[1:])]
    assert [gzip.decompress(one).decode() for one in members] == texts
    path.write_bytes(b"".join(members))
    assert gzip.decompress(path.read_bytes()).decode() == "".join(texts)
    assert run_of(path) == RUN


def test_equal_texts_are_equal_bytes_but_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for number, (text, now) in enumerate([("text\n", 1.0), ("text\n", 1e9), ("texd\n", 1e9)]):
        monkeypatch.setattr("time.time", lambda now=now: now)
        contents.append(member(text, f"{number:016x}") + member(text))
    assert contents[0] != contents[1]
    assert without_run(contents[0]) == without_run(contents[1]) != without_run(contents[2])
    assert without_run(gzip.compress(b"text")) == gzip.compress(b"text")


@pytest.mark.parametrize(
    "content",
    [b"", b"plain text", gzip.compress(b"text"), b"\x1f\x8b\x08\x10", bytes(99)],
    ids=["empty", "text", "gzip without comment", "cut header", "zeros"],
)
def test_other_files_are_of_no_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    assert run_of(tmp_path / "a") == ""


def test_ranks_of_a_run_share_its_id_and_no_others() -> None:
    """Ranks 0 and 1 of one torchrun; then a restart, another run, another port, and two nodes of one run."""
    elastic = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    elastic |= {"TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"}
    first = run_id({**elastic, "RANK": "0"}, parent=7)
    assert run_id({**elastic, "RANK": "1"}, parent=7) == first
    assert len({first, run_id(elastic, parent=8), run_id({**elastic, "MASTER_PORT": "1"}, parent=7)}) == 3
    assert run_id({**elastic, "TORCHELASTIC_RESTART_COUNT": "1"}, parent=7) != first
    nodes = {**elastic, "WORLD_SIZE": "4"}
    assert run_id(nodes, parent=7) == run_id(nodes, parent=8)
    steps = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
    assert run_id(steps, parent=7) == run_id(steps, parent=8) != run_id({**steps, "SLURM_STEP_ID": "1"}, parent=7)
