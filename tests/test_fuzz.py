"""Damaged and forged files of every format: a small part of ``python -m benchmarks fuzz``, and what that found."""

from __future__ import annotations

import csv
import json
import random
import shutil
from pathlib import Path

import pytest
from command_helpers import Main

from benchmarks import fuzz
from hashbench.core.errors import HashbenchError
from hashbench.core.io import from_json
from hashbench.core.results.folder import ResultsFolder, describe_differences
from hashbench.core.results.rows import csv_line, read_rows, row_from_json
from hashbench.core.trace import file as tracefile
from hashbench.tools.audit import audit_table

MUTATIONS = 8
"""Of each format: a thousand take half an hour. ``docs/security.md`` has their counts."""


@pytest.mark.parametrize("form", fuzz.FORMATS, ids=lambda form: form.name)
def test_no_damaged_file_crashes_hangs_or_is_called_equal(form: fuzz.Format) -> None:
    tried = fuzz.fuzz(form, mutations=MUTATIONS, seed=1, commands=1 if form.name != "repro" else 0)
    assert tried.problems == []
    assert sum(tried.counts.values()) == MUTATIONS
    assert tried.counts[fuzz.REFUSED] > 0, "no mutation reached the reader"


def test_mutations_are_the_same_for_the_same_seed_and_change_something() -> None:
    content = b'{"schema": 1, "a": [1, 2.5, "text"], "b": {"c": null}}\n'
    first, again = ([fuzz.mutated(content, random.Random(seed)) for seed in range(200)] for _ in range(2))
    assert first == again
    assert all(changed != content for _, changed in first)
    assert {kind for kind, _ in first} == {change.__name__.strip("_") for change in (*fuzz._OF_BYTES, *fuzz._OF_JSON)}


# -------------------------------------------------------------------------------------------- what the fuzzer found

SHARD = fuzz.SAMPLES / "shards" / "0"


def test_a_leaf_that_differs_without_reaching_a_result_is_no_equal_trace(tmp_path: Path, main: Main) -> None:
    sound = (fuzz.SAMPLES / "traces" / "first.log").read_text()
    (tmp_path / "a.log").write_text(sound)
    (tmp_path / "b.log").write_text(sound.replace("0000000000000000", "0000000000000001"))
    fuzz._seal_trace(tmp_path, tmp_path / "b.log")
    done = main("diff", "a.log", "b.log", cwd=tmp_path)
    assert done.returncode == 1
    assert "The traces are equal" not in done.stdout
    assert "1 leaf differs without reaching a result: input/0" in done.stdout


@pytest.mark.parametrize(("kind", "several"), [("result", "results"), ("leaf", "leaves")])
def test_a_trace_with_a_name_twice_is_refused(kind: str, several: str, tmp_path: Path) -> None:
    lines = (fuzz.SAMPLES / "traces" / "first.log").read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if line.startswith(f"{kind}\t"))
    path = tmp_path / "a.log"
    path.write_text("".join([*lines[: number + 1], *lines[number:]]))
    fuzz._seal_trace(tmp_path, path)
    with pytest.raises(HashbenchError, match=f"two {several} have one name"):
        tracefile.read(path)


def test_a_whole_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ValueError, match="it is a whole number of 1329 bits, which is not a float"):
        from_json(float, 10**400, where="it")


MODE_OF_NO_VERSION = {"options": {"mode": "../../x", "device": "cpu", "dtype": ""}}
SCHEMA_OF_NO_VERSION = {"rows": True}
DAMAGED_MANIFESTS: dict[str, dict[str, object]] = {
    "options that are a text": {"options": "training"},
    "models that are numbers": {"models": [[1, 2]]},
    "a model twice": {"models": [["a", "b"], ["a", "b"]]},
    "a mode that is a path": MODE_OF_NO_VERSION,
    "a mode that is a number": {"options": {"mode": 1, "device": "cpu", "dtype": ""}},
    "a partition that is a list": {"partition": [0, 1]},
    "a partition of words": {"partition": {"id": "0", "total": 1}},
    "suites that are a text": {"suites": "torchvision"},
    "a version that is no number": SCHEMA_OF_NO_VERSION,
}


@pytest.mark.parametrize("change", DAMAGED_MANIFESTS.values(), ids=DAMAGED_MANIFESTS)
def test_a_manifest_of_other_types_is_refused_by_all_that_read_it(
    change: dict[str, object], tmp_path: Path, main: Main
) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(SHARD, folder)
    manifest = json.loads((folder / "sweep.json").read_text())
    (folder / "sweep.json").write_text(json.dumps({**manifest, **change}))
    if change in (MODE_OF_NO_VERSION, SCHEMA_OF_NO_VERSION):
        assert "this is hashbench" in describe_differences(ResultsFolder(folder).read_manifest(), manifest)[0]
    else:
        with pytest.raises(HashbenchError, match=r"cannot resume .* is missing or damaged"):
            ResultsFolder(folder).read_manifest()
    shutil.copytree(fuzz.SAMPLES / "shards" / "1", tmp_path / "other")
    for command in (("compare", SHARD, "bad"), ("merge", "merged", "bad", "other")):
        done = main(*command, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_a_shard_of_another_selection_is_not_resumed() -> None:
    manifest = json.loads((SHARD / "sweep.json").read_text())
    other = {**manifest, "partition": {**manifest["partition"], "of": manifest["partition"]["of"][::-1]}}
    assert describe_differences(other, manifest) == ["it was a part of another selection of models"]


NO_NUMBERS = {
    "a rate without end": ("rate", "1e400", float("inf")),
    "a rate that is none": ("rate", "nan", float("nan")),
    "more than all": ("rate_high", "1.5", 1.5),
    "a time before the start": ("seconds", "-1", -1),
    "counts of 400 digits": ("trials", "9" * 400, 10**400),
}


@pytest.mark.parametrize(("column", "cell", "value"), NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_a_number_outside_of_its_range_is_refused(column: str, cell: str, value: float, tmp_path: Path) -> None:
    header, cells, *_ = csv.reader((SHARD / "accuracy.csv").read_text().splitlines())
    cells[header.index(column)] = cell
    (tmp_path / "accuracy.csv").write_text(f"{csv_line(header)}{csv_line(cells)}")
    with pytest.raises(HashbenchError, match=rf"as {column}: that is not "):
        read_rows(tmp_path / "accuracy.csv")
    row = json.loads(next((SHARD / "rows").iterdir()).read_text())
    with pytest.raises(ValueError, match=rf"not a row: {column} is .*\bnot\b"):
        row_from_json({**row, column: value})


def test_a_measurement_that_is_none_is_refused(tmp_path: Path) -> None:
    text = (fuzz.SAMPLES / "audits" / "base" / "audit.csv").read_text()
    (tmp_path / "audit.csv").write_text(text.replace("identical", "identkcal", 1))
    with pytest.raises(HashbenchError, match=r"line 2 of .* has the off 'identkcal': .* Did you mean identical\?"):
        audit_table.read(tmp_path)
