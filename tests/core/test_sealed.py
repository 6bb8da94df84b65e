"""Sealed JSON: it comes back as it was; what is truncated, changed or of another kind is refused in one line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import fuzzing
import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.sealed import Sealed, seal

CARTS = Sealed(1, "carts", consequence="nothing was sold ({})", tip="Fill {} again.")
SEALED = seal({"schema": 1, "b": [1, "two"], "a": None})


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------------------ a document


def test_seal_does_not_depend_on_order_and_is_made_once(tmp_path: Path) -> None:
    path = written(tmp_path / "cart.json", json.dumps(dict(reversed(SEALED.items()))))
    assert CARTS.read_document(path) == SEALED == seal(SEALED)
    assert CARTS.read_document(written(path, CARTS.document({"schema": 1, "b": [1, "two"], "a": None}))) == SEALED


DOCUMENTS = {
    "no object": ([SEALED], "it holds no carts"),
    "no schema": ({"b": 1}, "it holds no carts"),
    "another schema": ({**SEALED, "schema": 2}, "it has schema version 2, this hashbench reads 1"),
    "a bool": ({**SEALED, "schema": True}, "it has schema version True, this hashbench reads 1"),
    "changed": ({**SEALED, "b": []}, "it was changed: its checksum differs"),
    "more": ({**SEALED, "c": 1}, "it was changed: its checksum differs"),
    "no checksum": ({"schema": 1}, "it was changed: its checksum differs"),
    "deep": ({**SEALED, "b": nested(400)}, "it is nested deeper than 50 levels"),
}


@pytest.mark.parametrize(("content", "words"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_another_document_is_refused_in_one_line(content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"\A{words}\Z"):
        CARTS.read_document(written(tmp_path / "cart.json", json.dumps(content)))


def test_document_that_is_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\Acart is truncated or not JSON\Z"):
        CARTS.read_document(written(tmp_path / "cart.json", CARTS.document(SEALED)[:-3]), where="cart")


def test_file_beside_a_document_is_refused_unless_it_is_the_one(tmp_path: Path) -> None:
    path = written(tmp_path / "goods.pt", "abc")
    CARTS.refuse_other_file(path, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(ValueError, match=r"\Agoods.pt is truncated, changed, or of another carts\Z"):
        CARTS.refuse_other_file(path, "ba78")
    with pytest.raises(ValueError, match=r"\Anone.pt: No such file or directory\Z"):
        CARTS.refuse_other_file(tmp_path / "none.pt", "")


# ----------------------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class Good:
    """What is in a cart."""

    name: str


GOODS = (Good("tea"), Good("milk"))
TEXT = CARTS.lines({"shop": "x"}, GOODS)
TEA_AND_MILK = '{"name":"tea"}\n{"name":"milk"}'
OTHER_TEXTS = {
    "empty": ("", "it is truncated: its last line has no end"),
    "half": (TEXT[: len(TEXT) // 2], "it is truncated: its last line has no end"),
    "without its last line end": (TEXT[:-1], "it is truncated: its last line has no end"),
    "without its last line": (TEXT.replace('{"name":"milk"}\n', ""), "it was changed: its checksum differs"),
    "lines exchanged": (
        TEXT.replace(TEA_AND_MILK, '{"name":"milk"}\n{"name":"tea"}'), "it was changed: its checksum differs"),
    "no JSON": ("dev,name\n", "line 1 is not JSON .*"),
    "brackets without end": ("[" * 100_000 + "\n", r"line 1 is not JSON \(it is nested too deep\)"),
    "a list": ("[1, 2]\n", "it holds no carts"),
    "a long line": (TEXT + " " * (2**20 + 1) + "\n", "a line has more than 1 MiB"),
    "no good": (fuzzing.forged([{"schema": 1}, {}]).decode(), "line 2 lacks the fields name"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "words"), OTHER_TEXTS.values(), ids=OTHER_TEXTS)
def test_lines_that_are_others_are_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "carts.jsonl", TEXT)
    header, goods = CARTS.read_lines(path, Good, most=2**21, longest=2**20)
    assert (header["shop"], goods) == ("x", GOODS)
    with pytest.raises(ValueError, match=rf"\A{words}\Z"):
        CARTS.read_lines(written(path, text), Good, most=2**21, longest=2**20)


# ------------------------------------------------------------------------------------------------- appended lines


def test_appended_lines_survive_a_cut_and_no_change() -> None:
    lines = [CARTS.line({"good": name}) for name in ("tea", "milk")]
    goods, cut = CARTS.appended("".join(lines))
    assert ([each["good"] for each in goods], cut) == (["tea", "milk"], False)
    assert CARTS.appended("".join(lines)[:-5]) == (goods[:1], True)
    with pytest.raises(ValueError, match=r"\Aline 2 was changed, or is no line with a checksum\Z"):
        CARTS.appended("".join(lines).replace("milk", "wine"))


# ---------------------------------------------------------------------------------------------------- its errors


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("it is\ncut"), "it is cut"), (FileNotFoundError(2, "No such file or directory"), "No such file .*")],
)
def test_error_says_what_the_consequence_and_what_to_do(error: Exception, reason: str) -> None:
    words = rf"\Acannot use the carts in a/b: nothing was sold \({reason}\)\. Fill a/b again\.\Z"
    with pytest.raises(HashbenchError, match=words), CARTS.refusing(Path("a/b")):
        raise error
