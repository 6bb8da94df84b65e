"""The file round-trips; a damaged, modified or hostile one is refused as a whole."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hashbench.errors import HashbenchError
from hashbench.fingerprint import document
from hashbench.fingerprint.checking import check
from hashbench.fingerprint.document import Fingerprints, TensorWord, tensor_word
from hashbench.io import document_digest


def test_run_of_tells_inputs_apart(base: Fingerprints) -> None:
    begun: list[int] = []
    (model,) = base.models
    others = replace(model, name="other", deterministic="off"), replace(model, name="third", contents=("1:",) * 9)
    list(check(replace(base, models=(model, *others)), begin=begun.append))

    with_contents = sum("#" in " ".join(kernel.tensors) for kernel in model.kernels)
    assert len(begun) == 2 * base.kernels + with_contents


def test_file_roundtrip(base: Fingerprints, tmp_path: Path) -> None:
    document.write(tmp_path / "base.json", base)

    assert document.read(tmp_path / "base.json") == base
    assert (tmp_path / "base.json").stat().st_size < 150 * base.kernels + 2000  # environment and tables


def test_uncompressed_kernels_are_read(base: Fingerprints, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    document.write(path, base)
    assert document.read(changed_file(path, lambda _: None)) == base
    assert not isinstance(json.loads(path.read_text())["models"][0]["kernels"], str)


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


def changed_file(path: Path, change: Callable[[dict[str, Any]], object], *, forged: bool = True) -> Path:
    """The file with kernels that are not compressed, and with a change."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["models"] = [{**model, **document._table_of(model)} for model in content["models"]]
    change(content)
    if forged:
        content["sha256"] = document_digest(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another schema": (lambda it: it.update(schema=9), "it is of schema 9"),
    "other digests": (lambda it: it.update(schema=3), "it is of schema 3"),
    "no models": (lambda it: it.pop("models"), "it holds no fingerprints"),
    "a model twice": (lambda it: it["models"].append(it["models"][0]), "it has a model twice"),
    "other columns": (lambda it: it["models"][0].update(columns=["op"]), "have other columns"),
    "a field too many": (lambda it: it["models"][0].update(more=1), "has unknown fields: more"),
    "a row too short": (lambda it: it["models"][0]["kernels"][0].pop(), "another number of columns"),
    "a level that is none": (lambda it: it["models"][0].update(deterministic="x"), "settings that do not exist"),
    "a word that is none": (lambda it: it["models"][0]["words"].__setitem__(0, "float32[9"), "describes no tensor"),
    "a huge tensor": (lambda it: it["models"][0]["words"].__setitem__(0, f"float32[{10**9},{10**9}]"), "fits into"),
    "an argument of many": (
        lambda it: it["models"][0]["arguments"][0][0].append([{"each": 1, "times": 20_000}] * 6),
        "has more than 100000 arguments",
    ),
    "arguments that are missing": (lambda it: it["models"][0]["kernels"][0].__setitem__(1, 10**6), "is missing"),
    "three arguments": (lambda it: it["models"][0]["arguments"][0].extend([{}] * 2), "not a list and a mapping"),
    "no arguments": (lambda it: it["models"][0]["arguments"].__setitem__(0, []), "args"),
    "few bytes for many arguments": (
        lambda it: it["models"][0].update(
            kernels=it["models"][0]["kernels"][:1] * 200, arguments=[[[{"each": 1, "times": 20_000}] * 4]]
        ),
        "has more than 10000000 arguments",
    ),
    "a word that is missing": (lambda it: it["models"][0]["kernels"][0][2].append(10**6), "is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_file_raises(base: Fingerprints, tmp_path: Path, name: str) -> None:
    change, said = REFUSED[name]
    path = tmp_path / "base.json"
    document.write(path, base)

    with pytest.raises(HashbenchError, match=said):
        document.read(changed_file(path, change))


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        pytest.param('no base85: "', "are damaged", id="not a text of bytes"),
        pytest.param(base64.b85encode(b"{}").decode(), "are damaged", id="not compressed"),
        pytest.param(document._compressed({"kernels": [[1], [1, 2]]})[:-5], "are damaged", id="truncated"),
        pytest.param(document._compressed([1]), "are damaged", id="no table"),
        pytest.param(document._compressed({"kernels": [[1], [1, 2]]}), "another number of columns", id="uneven"),
        pytest.param(document._compressed({"kernels": [" " * 2**24]}), "take more than 16 MiB", id="a bomb"),
    ],
)
def test_damaged_kernels_raise(base: Fingerprints, tmp_path: Path, kernels: str, said: str) -> None:
    path = tmp_path / "base.json"
    document.write(path, base)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["models"][0]["kernels"] = kernels
    content["sha256"] = document_digest(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(HashbenchError, match=said):
        document.read(path)


def test_decompression_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MOST_BYTES", 2**20)
    bomb = {"kernels": base64.b85encode(zlib.compress(bytes(2**23), 9)).decode()}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="take more than 1 MiB"):
            document._table_of(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_truncated_or_modified_file_raises(base: Fingerprints, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    document.write(path, base)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(HashbenchError, match="it is not JSON"):
        document.read(path)
    path.write_text(whole.replace('"threads":', '"threads":1'), encoding="utf-8")
    with pytest.raises(HashbenchError, match="its checksum is another"):
        document.read(path)
