"""What the checks may be asked for, and where their files lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hashbench.testing.options import EVERY, NAMES, CheckFailedError, Options, folder_of, options_of


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"runs": 1}, "runs must be an int >= 2, got 1"),
        ({"runs": 2.0}, "runs must be an int >= 2, got 2.0"),
        ({"replays": 1}, "replays must be an int >= 2, got 1"),
        ({"deterministic": "yes"}, "deterministic must be 'on', 'warn', 'off' or None, got 'yes'"),
        ({"tracer": "fast"}, "tracer must be 'auto', 'native', 'python' or None, got 'fast'"),
        ({"seed": -1}, "seed must be an int from 0 to 2**32 - 1, got -1"),
        ({"diagnose_budget": float("nan")}, "diagnose_budget must be a number >= 0, got nan"),
        ({"diagnose_budget": "30"}, "diagnose_budget must be a number >= 0, got '30'"),
        ({"repeat": 3}, "it has no option repeat; it has runs, seed"),
    ],
)
def test_nonsense_is_refused_in_words(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckFailedError) as failed:
        options_of(asked, {}, of="it")
    assert str(failed.value).startswith(words)
    assert failed.value.findings == ()


def test_what_a_call_sets_comes_before_the_defaults_of_its_caller() -> None:
    defaults = {"runs": 7, "tracer": "python"}
    assert options_of({"runs": 3, "tracer": None}, defaults, of="it") == Options(runs=3, tracer="python")
    assert options_of({}, defaults, of="it").runs == 7


def test_a_check_names_the_options_that_it_has() -> None:
    with pytest.raises(CheckFailedError, match=r"^it has no option stress; it has ranks, seed, deterministic, "):
        options_of({"stress": True}, {}, of="it", names=EVERY, own="ranks")
    assert set(EVERY) < set(NAMES)


def test_a_temporary_folder_stays_only_with_files_in_it() -> None:
    with folder_of(Options()) as empty:
        assert empty.is_dir()
    assert not empty.exists()
    with folder_of(Options()) as full:
        (full / "file").touch()
    assert full.exists()
    (full / "file").unlink()
    full.rmdir()


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    found = []
    for _ in range(3):
        with folder_of(Options(output=kept)) as folder:
            found.append(folder.name)
            folder.mkdir()
    assert found == ["kept", "kept-2", "kept-3"]


@pytest.mark.parametrize("output", ["taken", "taken/below"])
def test_a_file_is_no_folder(output: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(CheckFailedError, match=r"output: .*taken is not a folder"):
        Options(output=tmp_path / output)
