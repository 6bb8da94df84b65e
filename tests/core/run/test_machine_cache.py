"""What a look at this machine found is taken from the cache for a day, unless anything that it depends on changed."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.run import environment, machine_cache
from hashbench.core.run.machine_cache import AskedLook, keep, recall

LOOK = AskedLook(("cpu", "auto", ""), {"OMP_NUM_THREADS": "2"}, {"torch": "2.15"})
FOUND: dict[str, Any] = {"key": "abc", "tracer": "native", "tracer_reason": "", "threads": {"intra_op": 2}}

Change = Callable[[pytest.MonkeyPatch, Path], object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache, and an empty folder as torch."""
    monkeypatch.setenv("HASHBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    monkeypatch.setattr(machine_cache, "_torch", lambda: tmp_path / "torch")
    return tmp_path / "cache" / "native"


def kept_file(cache: Path) -> Path:
    [file] = cache.glob("machine-*.json")
    return file


def test_what_was_found_is_recalled() -> None:
    assert recall(LOOK) is None
    keep(LOOK, FOUND)
    assert recall(LOOK) == FOUND


@pytest.mark.parametrize(
    "other",
    [
        replace(LOOK, asked=("cuda", "auto", "")),
        replace(LOOK, asked=("cpu", "python", "")),
        replace(LOOK, variables={"OMP_NUM_THREADS": "1"}),
        replace(LOOK, variables={}),
        replace(LOOK, packages={"torch": "2.16"}),
    ],
)
def test_another_look_finds_for_itself(other: AskedLook) -> None:
    keep(LOOK, FOUND)
    assert recall(other) is None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, path: (path / "torch/lib/libtorch_cpu.so").touch(), id="torch"),
        pytest.param(lambda _, path: (path / "cache/native/recorder-1.so").touch(), id="native tracer"),
        pytest.param(lambda patch, _: patch.setattr(os, "cpu_count", lambda: 1000), id="cores"),
        pytest.param(lambda patch, _: patch.setattr(machine_cache, "_affinity", lambda: [999]), id="affinity"),
        pytest.param(lambda patch, _: patch.setattr(platform, "uname", lambda: ("other", "")), id="host"),
        pytest.param(lambda patch, _: patch.setattr(machine_cache, "_identity", str), id="boot, driver or processor"),
        pytest.param(lambda patch, _: patch.setattr(machine_cache, "_DEVICES", ("/dev/null",)), id="device files"),
        pytest.param(lambda patch, _: patch.setattr(machine_cache, "_newest", lambda _: (0, 0)), id="hashbench"),
        pytest.param(lambda patch, _: patch.setattr("sys.version", "4.0"), id="Python"),
    ],
)
def test_what_the_description_depends_on_makes_it_unknown(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(LOOK, FOUND)
    change(monkeypatch, tmp_path)
    assert recall(LOOK) is None


@pytest.mark.parametrize(("age", "known"), [(0, True), (86_300, True), (86_500, False), (-3_600, False)])
def test_a_description_lasts_a_day(age: float, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(LOOK, FOUND)
    now = time.time()
    monkeypatch.setattr(machine_cache.time, "time", lambda: now + age)
    assert (recall(LOOK) is not None) == known


def test_old_descriptions_are_removed(cache: Path) -> None:
    keep(LOOK, FOUND)
    os.utime(kept_file(cache), (0, 0))
    keep(replace(LOOK, variables={}), FOUND)
    assert len(list(cache.glob("machine-*.json"))) == 1
    assert recall(replace(LOOK, variables={})) == FOUND


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="truncated"),
        pytest.param(lambda text: text.replace("native", "python"), id="changed"),
        pytest.param(lambda _: "", id="empty"),
        pytest.param(lambda _: "[1, 2]", id="no object"),
        pytest.param(lambda text: json.dumps({**json.loads(text), "schema": 2}), id="another schema"),
        pytest.param(lambda _: machine_cache._FILE.document({"schema": 1}), id="nothing in it"),
        pytest.param(
            lambda text: machine_cache._FILE.document({**json.loads(text), "key": "another"}), id="of another key"
        ),
    ],
)
def test_a_damaged_file_counts_as_absent_and_is_replaced(damage: Callable[[str], str], cache: Path) -> None:
    keep(LOOK, FOUND)
    kept_file(cache).write_text(damage(kept_file(cache).read_text()))
    assert recall(LOOK) is None
    keep(LOOK, FOUND)
    assert recall(LOOK) == FOUND


def test_without_a_folder_nothing_is_kept_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_cache.caches, "folders", lambda: (Path("/proc/none/native"), Path("/dev/null/native")))
    keep(LOOK, FOUND)
    assert recall(LOOK) is None


class Looks:
    """Stands in for the process that looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
        self.found, self.number = {**FOUND, **found}, 0
        monkeypatch.setattr(environment, "_collect_in_new_process", self.look)

    def look(self, *_: object) -> str:
        self.number += 1
        return json.dumps(self.found)


def asked(**more: Any) -> dict[str, Any]:
    return environment.collect_in_child(device="cpu", variables={}, **more)


def test_the_second_look_starts_no_process_and_a_fresh_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    assert asked() == asked() == FOUND
    assert looks.number == 1
    looks.found["threads"] = {"intra_op": 3}
    assert asked(fresh=True) == asked() == looks.found
    assert looks.number == 2


@pytest.mark.parametrize(
    "found",
    [
        pytest.param({"tracer": "python", "tracer_reason": "there is no compiler"}, id="no native tracer"),
        pytest.param({"digests": {"name": "copies", "reason": "no triton"}}, id="slow digests"),
    ],
)
def test_what_may_be_mended_is_looked_for_each_time(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, **found)
    assert asked() == asked() == looks.found
    assert looks.number == 2


def test_a_refusal_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    refused, looks.found = looks.found, {"error": {"what": "no such device", "consequence": "", "tip": ""}}
    with pytest.raises(HashbenchError, match="no such device"):
        asked()
    looks.found = refused
    assert asked() == FOUND


def test_variables_of_libraries_are_part_of_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    for name, counts in (
        ("OMP_NUM_THREADS", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("HASHBENCH_CXXFLAGS", True),
        ("NOTHING_OF_OURS", False),
    ):
        asked()
        before = looks.number
        monkeypatch.setenv(name, "another")
        asked()
        assert looks.number == before + counts, name
