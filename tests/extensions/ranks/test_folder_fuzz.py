"""Folders of ranks that were cut, swapped or mixed: two runs agree only where every rank of both is whole and equal."""

from __future__ import annotations

import contextlib
import gzip
import random
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.trace import file
from hashbench.core.trace.step_file import member, rank_path
from hashbench.extensions.ranks.find import find_across_ranks
from hashbench.extensions.ranks.folder import read_both
from tests.extensions.ranks.rank_traces import traces

Files = dict[int, bytes]
"""The content of a folder, by rank."""

WORLD = 3


def content(run: Mapping[int, file.Trace], launched: str) -> Files:
    """Return the files that a recording of these traces leaves: one gzip member for each step."""
    found: Files = {}
    for rank, trace in run.items():
        first, *texts = filter(None, re.split(r"(?m)^(step\t.*\n)", file.dumps(trace)))
        found[rank] = member(first, launched) + b"".join(map(member, texts))
    return found


@pytest.fixture(scope="module")
def runs() -> dict[str, Files]:
    """The files of a run, of one that differs on a rank, and of runs of other programs."""
    made = {
        "plain": traces(WORLD),
        "differs": traces(WORLD, guilty=1, run=1),
        "smaller": traces(2),
        "larger": traces(4),
    }
    return {name: content(run, name) for name, run in made.items()}


Change = Callable[[random.Random, Files, Mapping[str, Files]], object]


def _one(chance: random.Random, files: Files) -> int:
    return chance.choice(sorted(files))


def _drop(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    del files[_one(chance, files)]


def _cut(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    rank = _one(chance, files)
    files[rank] = files[rank][: chance.randrange(len(files[rank]) + 1)]


def _cut_between_members(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    rank = _one(chance, files)
    begins = [at for at in range(len(files[rank])) if files[rank][at : at + 3] == b"\x1f\x8b\x08"]
    files[rank] = files[rank][: chance.choice(begins)]


def _flip(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    rank = _one(chance, files)
    if files[rank]:
        changed = bytearray(files[rank])
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        files[rank] = bytes(changed)


def _swap(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    a, b = _one(chance, files), _one(chance, files)
    files[a], files[b] = files[b], files[a]


def _copy(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    files[_one(chance, files)] = files[_one(chance, files)]


def _from_another_run(chance: random.Random, files: Files, runs: Mapping[str, Files]) -> None:
    other = runs[chance.choice(sorted(runs))]
    rank = _one(chance, other)
    files[rank] = other[rank]


def _edit_with_checksum(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    """Change the last results and close the text anew, as a forger would."""
    rank = _one(chance, files)
    text = _text(files[rank])
    if text is not None and _is_whole(text):
        trace = file.loads(text)
        results = tuple(replace(one, digest=one.digest._replace(value="0" * 16)) for one in trace.results)
        steps = (*trace.steps[:-1], *(replace(step, results=results) for step in trace.steps[-1:]))
        files[rank] = gzip.compress(file.dumps(replace(trace, results=results, steps=steps)).encode())


def _doubled(chance: random.Random, files: Files, _: Mapping[str, Files]) -> None:
    rank = _one(chance, files)
    files[rank] += files[rank][: chance.randrange(len(files[rank]) + 1)]


CHANGES: tuple[Change, ...] = (
    *(_drop, _cut, _cut_between_members, _flip, _swap, _copy, _from_another_run, _from_another_run),
    *(_edit_with_checksum, _doubled),
)


def _text(packed: bytes) -> str | None:
    """Return the text of the whole gzip members that a file begins with; ``None`` if there is no text."""
    text = b""
    while packed:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(packed)
        except zlib.error:
            return None
        if not member.eof:
            break
        text, packed = text + part, member.unused_data
    try:
        return text.decode() if text else None
    except UnicodeDecodeError:
        return None


def _is_whole(text: str | None) -> bool:
    try:
        return text is not None and bool(file.loads(text))
    except HashbenchError:
        return False


def _are_whole_and_equal(first: Files, second: Files, runs: Mapping[str, Files]) -> bool:
    """Return True if both folders hold the same whole ranks of one run."""
    texts = [{rank: _text(packed) for rank, packed in files.items()} for files in (first, second)]
    all_are_there = any(first.keys() == run.keys() for run in runs.values())
    return texts[0] == texts[1] and all_are_there and all(map(_is_whole, texts[0].values()))


def _judge(seed: int, runs: Mapping[str, Files], at: Path) -> tuple[bool, bool]:
    """Change two folders of equal or differing runs; return whether they are said to agree, and whether they may be."""
    chance = random.Random(seed)
    pair = dict(runs["plain"]), dict(runs[chance.choice(["plain", "plain", "plain", "differs"])])
    for _ in range(chance.randrange(1, 4)):
        files = chance.choice(pair)
        if files:
            chance.choice(CHANGES)(chance, files, runs)
    folders = at / f"{seed}a", at / f"{seed}b"
    for folder, files in zip(folders, pair, strict=True):
        folder.mkdir()
        for rank, packed in files.items():
            rank_path(folder, rank).write_bytes(packed)
    may = _are_whole_and_equal(*pair, runs)
    with contextlib.suppress(HashbenchError):
        first, second = read_both(*folders)
        return find_across_ranks(first.traces, second.traces, world_size=first.world_size).equal, may
    return False, may


def _false_words(seeds: range, runs: Mapping[str, Files], at: Path) -> list[int]:
    return [seed for seed in seeds if (found := _judge(seed, runs, at))[0] and not found[1]]


def test_unchanged_folders_agree(runs: Mapping[str, Files], tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        for rank, packed in runs["plain"].items():
            rank_path(folder, rank).write_bytes(packed)
    first, second = read_both(tmp_path / "a", tmp_path / "b")
    assert find_across_ranks(first.traces, second.traces, world_size=WORLD).equal


def test_no_folder_that_was_changed_is_said_to_agree(runs: Mapping[str, Files], tmp_path: Path) -> None:
    assert _false_words(range(100), runs, tmp_path) == []


@pytest.mark.exhaustive
def test_no_folder_of_a_thousand_is_said_to_agree(runs: Mapping[str, Files], tmp_path: Path) -> None:
    assert _false_words(range(100, 1100), runs, tmp_path) == []
