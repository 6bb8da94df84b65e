"""Lines of a recording: whole after a kill, refused where changed."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from fuzzing import damaged, readings

from hashbench.core.errors import HashbenchError
from hashbench.extensions.watch import file

HEADER = {
    "schema": 2,
    "rank": 0,
    "world_size": 1,
    "start": None,
    "every": 16,
    "model": "Net",
    "device": "cpu",
    "parameter": ["fc.weight", "fc.bias"],
    "buffer": ["norm.mean"],
    "traced": [],
    "command": ["python", "train.py"],
    "versions": {"torch": "2.15.0"},
}


def step(number: float, **parts: object) -> str:
    return file.line("step", {"step": number, **parts})


def written(folder: Path, *lines: str, name: str = "rank0.jsonl", **header: object) -> Path:
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    whole = [file.line("header", {**HEADER, **header}), *lines]
    if whole[-1] == END:
        whole[-1] = end(whole[:-1])
    path.write_text("".join(whole), encoding="utf-8")
    return path


def end(lines: Sequence[str], **more: object) -> str:
    checked = hashlib.sha256("".join(lines).encode())
    steps = sum('"line":"step"' in line for line in lines)
    content = {"steps": steps, "ended": "", "missed": [], "lines": len(lines), "sum": file.sum_of(checked)}
    return file.line("end", {**content, **more})


END = "the last line, made from those before it"
BEFORE = (file.line("start", {"step": -1, "complete": True}), file.line("order", {"order": [[0, 1]]}))


def test_a_recording_is_read_as_written(tmp_path: Path) -> None:
    lines = [
        file.line("start", {"step": -1, "complete": True, "parameter": {"0": "aa"}, "state": {}}),
        file.line("order", {"order": [[1, 0]]}),
        step(0, batch=["b0"], loss=["l0"], loss_value=[0.5], lr=["0.1"], options={"momentum.0": "0"}),
        step(1, gradient={"1": "g"}, parameter={"0": "bb"}, buffer={"0": "m"}, state={"exp_avg": {"1": "s"}}),
        file.line("final", {"step": 1, "complete": True, "parameter": {"0": "cc"}}),
        END,
    ]
    read = file.read(written(tmp_path, *lines))

    assert (read.ended, read.missed) == ("", ())
    assert read.final is not None
    assert (read.final.number, read.final.parts) == (1, {"parameter": {"fc.weight": "cc"}})
    assert read.optimizers == [[["fc.bias", "fc.weight"]]]
    assert read.before is not None
    assert read.before.parts == {"parameter": {"fc.weight": "aa"}, "state": {}}
    assert read.steps[0].losses == (0.5,)
    assert read.steps[0].parts["batch"] == {"0": "b0"}
    assert read.steps[1].parts["buffer"] == {"norm.mean": "m"}
    assert read.steps[1].parts["state"] == {"fc.bias: exp_avg": "s"}
    assert read.steps[1].parts["options"] == {"momentum.0": "0"}, "a line has them only where they changed"


def test_names_and_beginnings_of_many_lines_are_one(tmp_path: Path) -> None:
    """Tensors join the model by a line each, and optimizers tell their states by a line each: a later one precedes."""
    many = 300
    joined = [file.line("names", {"parameter": [f"p{one}"], "buffer": [f"b{one}"]}) for one in range(many)]
    starts = [
        file.line("start", {"step": -1, "complete": not one, "parameter": {"0": "w", str(one + 2): f"d{one}"}})
        for one in range(many)
    ]
    again = file.line("start", {"step": -1, "buffer": {"1": "b"}, "parameter": {"0": "last"}, "state": {}})
    read = file.read(written(tmp_path, *joined, *starts, again, BEFORE[1], END))
    names = [f"p{one}" for one in range(many)]
    assert read.header.parameter == ("fc.weight", "fc.bias", *names)
    assert read.header.buffer == ("norm.mean", *(f"b{one}" for one in range(many)))
    assert read.before is not None
    assert (read.before.number, read.before.complete) == (-1, True)
    assert read.before.parts == {
        "parameter": {"fc.weight": "last"} | {name: f"d{one}" for one, name in enumerate(names)},
        "buffer": {"b0": "b"},
    }
    with pytest.raises(HashbenchError, match="a tensor has the index 2, of 2"):
        file.read(written(tmp_path / "late", starts[0], joined[0], END))


def test_every_prefix_of_a_file_has_its_whole_lines(tmp_path: Path) -> None:
    text = written(tmp_path, *BEFORE, *(step(number, batch=[f"b{number}"]) for number in range(3)), END).read_text()
    first = text.index("\n") + 1
    for size in range(first, len(text) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_text(text[:size], encoding="utf-8")
        read = file.read(path)
        assert len(read.steps) == text[first:size].rpartition("\n")[0].count('"line":"step"')
        assert (read.ended == "") == (size == len(text))


def without(text: str, *removed: int) -> str:
    return "".join(line for number, line in enumerate(text.splitlines(keepends=True)) if number not in removed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace('"b1"', '"b7"'), "line 5 was changed"),
        (lambda text: text.replace('"schema":2', '"schema":3'), "line 1 was changed"),
        (lambda text: without(text, 4), "after step 0"),
        (lambda text: without(text, 0), "its first line is no header"),
        (lambda text: without(text, 1), "its end counts 6 lines and 3 steps, it holds 5 and 3"),
        (lambda text: without(text, 2), "its end counts 6 lines"),
        (lambda text: without(text, 5), "it holds 5 and 2"),
        (lambda text: without(text, 1, 6), "lines were taken out of it: those before the first step"),
        (lambda text: without(text, 3, 6), "lines were taken out of it: those before the first step"),
        (lambda text: text.splitlines(keepends=True)[0] + text, "unknown kind, 'header'"),
        (lambda text: text + text.splitlines(keepends=True)[5], "line 8 follows the last one"),
        (lambda _: "", "no whole line"),
        (lambda _: "hashbench-trace\t1\n", "line 1 was changed, or is no line with a checksum"),
    ],
)
def test_a_changed_file_is_refused_in_one_line(tmp_path: Path, change: object, words: str) -> None:
    path = written(tmp_path, *BEFORE, *(step(number, batch=[f"b{number}"]) for number in range(3)), END)
    path.write_text(change(path.read_text()), encoding="utf-8")  # type: ignore[operator]
    with pytest.raises(HashbenchError, match=words) as raised:
        file.read(path)
    assert "\n" not in str(raised.value)


def test_another_schema_is_named(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="has schema version 7, this hashbench reads 2"):
        file.read(written(tmp_path, END, schema=7))


FORGED = {
    "an index too high": (step(0, parameter={"5": "x"}), "a tensor has the index 5, of 2"),
    "an index below 0": (step(0, parameter={"-1": "x"}), "a tensor has the index -1, of 2"),
    "an unknown kind": (file.line("other", {}), "line 2 is of an unknown kind, 'other'"),
    "no number of a step": (file.line("step", {"parameter": {}}), "a line has no field 'step'"),
    "an index without end": (file.line("order", {"order": [[math.inf]]}), "line 2: its order[0][0] is 'inf'"),
    "a loss that is no float": (step(0, loss_value=[10**400]), "its loss_value[0] is a whole number of 1329 bits"),
    "a list of tensors": (step(0, parameter=["aa"]), "its parameter is "),
    "a state of one number": (step(0, state={"exp_avg": 1}), "its state['exp_avg'] is '1'"),
    "a beginning that is a text": (step(0, begin="aa"), "its begin is 'aa'"),
}


@pytest.mark.parametrize(("line", "words"), FORGED.values(), ids=FORGED)
def test_a_forged_line_with_a_right_checksum_is_refused_in_one_line(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(HashbenchError, match=re.escape(words)) as caught:
        file.read(written(tmp_path, line))
    assert "\n" not in str(caught.value)


def test_damage_is_refused_or_leaves_whole_lines(tmp_path: Path) -> None:
    path = written(tmp_path, *BEFORE, *(step(number, batch=[f"b{number}"]) for number in range(3)), END)
    content, whole = path.read_bytes(), file.read(path)
    for name, read in readings(path, damaged(content, flips=200), file.read):
        assert read is None or (read.steps.items() <= whole.steps.items() and read.ended == "cut"), name


def test_a_folder_without_a_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="holds no recording"):
        file.ranks(tmp_path)
    with pytest.raises(HashbenchError, match="holds no recording"):
        file.ranks(tmp_path / "missing")


def test_ranks_and_traces_are_found_by_name(tmp_path: Path) -> None:
    for name in ("rank1.jsonl", "rank0.jsonl", "rank0.steps3-5.log.gz", "rank0.jsonl.txt", "notes"):
        (tmp_path / name).touch()
    assert list(file.ranks(tmp_path)) == [0, 1]
    assert list(file.traces(tmp_path)) == [(0, 3, 5)]
    assert file.trace_name(0, 3, 5) == "rank0.steps3-5.log.gz"


def test_pandas_reads_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, step(0, loss_value=[0.5], batch=["x"]), step(1, loss_value=[0.25], batch=["y"]), END)
    frame = pd.read_json(path, lines=True)
    assert frame[frame["line"] == "step"]["loss_value"].tolist() == [[0.5], [0.25]]
    assert all(json.loads(line)["checksum"] for line in path.read_text().splitlines())
