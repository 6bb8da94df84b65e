"""The file round-trips; a damaged, modified or hostile one is refused as a whole."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzzing
import pytest

from hashbench.core.errors import HashbenchError
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.checking import check
from hashbench.extensions.fingerprint.document import Fingerprints, TensorWord, tensor_word


def test_run_of_tells_inputs_apart(base: Fingerprints) -> None:
    begun: list[int] = []
    (model,) = base.models
    others = replace(model, name="other", deterministic="off"), replace(model, name="third", contents=("1:",) * 9)
    list(check(replace(base, models=(model, *others)), begin=begun.append))

    with_contents = sum("#" in " ".join(kernel.tensors) for kernel in model.kernels)
    assert len(begun) == 2 * base.kernels + with_contents


def test_name_decides_on_compression(base: Fingerprints, tmp_path: Path) -> None:
    plain, packed = tmp_path / "base.jsonl", tmp_path / "base.jsonl.gz"
    document.write(plain, base)
    document.write(packed, base)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert document.read(packed) == document.read(plain) == base
    assert packed.stat().st_size < 150 * base.kernels + 1000  # the header
    assert plain.read_text(encoding="utf-8").count("\n") == 1 + base.kernels


@pytest.mark.parametrize(
    "word",
    [
        TensorWord("float32", (8, 64), (64, 1)),
        TensorWord("int64", (), (), values="#3"),
        TensorWord("bool", (2, 3), (1, 2), offset=5, memory=1, values="0..1", digest="ab"),
        TensorWord("float32", (0,), (1,), values=">=0"),
    ],
)
def test_tensor_word_roundtrip(word: TensorWord) -> None:
    assert tensor_word(word.text()) == word


Lines = list[Any]


def deep(levels: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(levels), [])


REFUSED: dict[str, tuple[Callable[[Lines], object], str]] = {
    "another schema": (lambda it: it[0].update(schema=9), "it has schema version 9, this hashbench reads 1"),
    "no schema": (lambda it: it[0].pop("schema"), "it holds no fingerprints"),
    "no models": (lambda it: it[0].pop("models"), "line 1 lacks the fields models"),
    "a model twice": (lambda it: (it[0]["models"].extend(it[0]["models"]), it.extend(it[1:])), "it has a model twice"),
    "a field too many": (lambda it: it[0]["models"][0].update(more=1), "a model has unknown fields: more"),
    "fewer than none": (lambda it: it[0]["models"][0].update(kernels=-1), "number of kernels of a model is -1"),
    "more than can be": (lambda it: it[0]["models"][0].update(kernels=10**40), "number of kernels of a model is 1000"),
    "a line too few": (lambda it: it.pop(), "another number of kernels"),
    "a line too many": (lambda it: it.append(it[-1]), "another number of kernels"),
    "a level that is none": (lambda it: it[0]["models"][0].update(deterministic="x"), "settings that do not exist"),
    "no thread": (lambda it: it[0]["models"][0].update(threads=0), "settings that do not exist"),
    "a kernel without an op": (lambda it: it[1].pop("op"), "line 2 lacks the fields op"),
    "an output that is none": (lambda it: it[1].update(outputs=["9"]), "describes no tensor"),
    "a huge tensor": (lambda it: it[1].update(tensors=[f"float32[{10**9},{10**9}]"]), "no tensor that fits into"),
    "arguments that are nested": (lambda it: it[1].update(args=deep(300)), "line 2.* nested deeper than"),
}  # fmt: skip


@pytest.fixture
def written(base: Fingerprints, tmp_path: Path) -> Path:
    document.write(tmp_path / "base.json", base)
    return tmp_path / "base.json"


def lines_of(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", REFUSED)
def test_forged_file_is_refused_in_one_line(written: Path, name: str) -> None:
    change, said = REFUSED[name]
    lines = lines_of(written)
    change(lines)
    written.write_bytes(fuzzing.forged(lines))
    refused_in_one_line(written, said)


def refused_in_one_line(path: Path, said: str) -> None:
    with pytest.raises(HashbenchError, match=said) as raised:
        document.read(path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"cannot use the fingerprints in {path}: ")
    assert "Record it again" in str(raised.value)


def test_damaged_file_is_refused_as_a_whole(written: Path) -> None:
    content = written.read_bytes()
    assert not any(found for _, found in fuzzing.readings(written, fuzzing.damaged(content), document.read))


def test_odd_values_with_a_fitting_checksum_are_refused_or_read_as_what_they_are(written: Path) -> None:
    bad = fuzzing.altered_lines(lines_of(written), most=300)
    found = [read for _, read in fuzzing.readings(written, bad, document.read)]
    assert 100 < found.count(None) < len(found)


def test_long_line_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes() + b" " * (2**24 + 1) + b"\n")
    refused_in_one_line(written, "a line has more than 16 MiB")


def test_text_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_BYTES", 2**20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(2**20 + 1)))
    refused_in_one_line(tmp_path / "bomb.gz", r"bomb\.gz has more than 1 MiB of text")


def test_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    refused_in_one_line(tmp_path / "base.json", "No such file or directory")
