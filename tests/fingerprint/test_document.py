"""The file round-trips; a damaged, modified or hostile one is refused as a whole."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hashbench import io
from hashbench.errors import HashbenchError
from hashbench.fingerprint import document
from hashbench.fingerprint.checking import check
from hashbench.fingerprint.document import Fingerprints, TensorWord, tensor_word


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


Lines = list[dict[str, Any]]


def forged(path: Path, change: Callable[[Lines], object]) -> Path:
    """The file with a change of its lines, and a checksum that fits."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(lines)
    header, *kernels = lines
    path.write_text(io.sealed_text(header, list(map(json.dumps, kernels))), encoding="utf-8")
    return path


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, tuple[Callable[[Lines], object], str]] = {
    "another schema": (lambda it: it[0].update(schema=9), "it has schema version 9, this hashbench reads 1"),
    "a schema that is no number": (lambda it: it[0].update(schema=True), "it has schema version True"),
    "no schema": (lambda it: it[0].pop("schema"), "it holds no fingerprints"),
    "no models": (lambda it: it[0].pop("models"), "line 1 lacks the fields models"),
    "models that are a text": (lambda it: it[0].update(models="all"), "line 1.models is 'all', which is not list"),
    "a model twice": (lambda it: (it[0]["models"].extend(it[0]["models"]), it.extend(it[1:])), "it has a model twice"),
    "a field too many": (lambda it: it[0]["models"][0].update(more=1), "a model has unknown fields: more"),
    "a header with kernels": (lambda it: it[0].update(lines=[]), "line 1 has unknown fields: lines"),
    "a number that is a text": (lambda it: it[0]["models"][0].update(kernels="9"), "is '9', which is not int"),
    "fewer than none": (lambda it: it[0]["models"][0].update(kernels=-1), "number of kernels of a model is -1"),
    "more than there are": (lambda it: it[0]["models"][0].update(kernels=10**6), "another number of kernels"),
    "more than can be": (lambda it: it[0]["models"][0].update(kernels=10**40), "number of kernels of a model is 1000"),
    "a line too few": (lambda it: it.pop(), "another number of kernels"),
    "a line too many": (lambda it: it.append(it[-1]), "another number of kernels"),
    "a level that is none": (lambda it: it[0]["models"][0].update(deterministic="x"), "settings that do not exist"),
    "no thread": (lambda it: it[0]["models"][0].update(threads=0), "settings that do not exist"),
    "a kernel without an op": (lambda it: it[1].pop("op"), "line 2: kernel lacks the fields op"),
    "a kernel that is a list": (lambda it: it.__setitem__(2, []), "line 3: kernel is .*, which is not dict"),
    "a word that is no text": (lambda it: it[1].update(tensors=[1]), r"kernel.tensors\[0\] is '1', which is not str"),
    "a word that is none": (lambda it: it[1].update(tensors=["float32[9"]), "describes no tensor"),
    "an output that is none": (lambda it: it[1].update(outputs=["9"]), "describes no tensor"),
    "a huge tensor": (lambda it: it[1].update(tensors=[f"float32[{10**9},{10**9}]"]), "no tensor that fits into"),
    "arguments that are nested": (lambda it: it[1].update(args=deep(300)), "line 2: .* nested deeper than"),
    "an environment that is nested": (lambda it: it[0].update(environment={"a": deep(300)}), "deeper than 50 levels"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_forged_file_is_refused_in_one_line(base: Fingerprints, tmp_path: Path, name: str) -> None:
    change, said = REFUSED[name]
    document.write(tmp_path / "base.json", base)
    refused_in_one_line(forged(tmp_path / "base.json", change), said)


def refused_in_one_line(path: Path, said: str) -> None:
    with pytest.raises(HashbenchError, match=said) as raised:
        document.read(path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"cannot use {path}: ")
    assert "Record it again" in str(raised.value)


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "it is truncated"),
    "half": (lambda text: text[: len(text) // 2], "it is truncated: its last line has no end"),
    "without its last line": (lambda text: b"".join(text.splitlines(keepends=True)[:-1]), "its checksum is another"),
    "without its last line end": (lambda text: text[:-1], "it is truncated: its last line has no end"),
    "a number changed": (lambda text: text.replace(b'"threads":', b'"threads":1'), "its checksum is another"),
    "a kernel changed": (lambda text: text.replace(b"aten.silu.default", b"aten.relu.default"), "its checksum"),
    "lines exchanged": (lambda text: b"\n".join([*(its := text.split(b"\n"))[:1], *its[2:-1], its[1], b""]), "checks"),
    "no JSON": (lambda _: b"dev,name,batch_size\n", "line 1 is not JSON"),
    "brackets without end": (lambda _: b"[" * 100_000 + b"\n", r"line 1 is not JSON \(it is nested too deep\)"),
    "a list": (lambda _: b"[1, 2]\n", "it holds no fingerprints"),
    "no text": (lambda _: b"\xff\xfe{}\n", "it is not a text file"),
    "half of gzip": (lambda text: gzip.compress(text)[:-20], "it is truncated"),
    "gzip with a bit changed": (lambda text: gzip.compress(text)[:-8] + b"\0" * 8, "it is damaged"),
    "gzip and more": (lambda text: gzip.compress(text) + b"more", "data follow the end"),
    "compressed twice": (lambda text: gzip.compress(gzip.compress(text)), "it is not a text file"),
    "a bomb": (lambda _: gzip.compress(bytes(2**27 + 1)), "has more than 128 MiB of text"),
    "a long line": (lambda text: text + b" " * (2**24 + 1) + b"\n", "a line has more than 16 MiB"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_refused_in_one_line(base: Fingerprints, tmp_path: Path, name: str) -> None:
    change, said = DAMAGED[name]
    path = tmp_path / "base.json"
    document.write(path, base)
    path.write_bytes(change(path.read_bytes()))
    refused_in_one_line(path, said)


def test_decompression_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_BYTES", 2**20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(2**24)))
    tracemalloc.start()
    try:
        refused_in_one_line(tmp_path / "bomb.gz", r"bomb\.gz has more than 1 MiB of text")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    refused_in_one_line(tmp_path / "base.json", "No such file or directory")
