"""Kinds of values, terminals and their widths, and values made of parsed flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hashbench.cli.flags import Look, at_least, look_of, made_of, new_folder, say


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (at_least(1), "0", "must be >= 1, got 0"),
        (at_least(1, most=5), "6", "must be <= 5, got 6"),
        (at_least(0.1, float), "nan", "must be >= 0.1, got nan"),
        (at_least(1), "1.5", "'1.5' is not a number"),
        (at_least(1, most=5), "5", 5),
        (at_least(0.1, float), "0.1", 0.1),
    ],
)
def test_numbers_have_bounds(kind: Any, text: str, said: object) -> None:
    if not isinstance(said, str):
        assert kind(text) == said
        return
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        kind(text)
    assert str(raised.value) == said


@dataclass(frozen=True)
class Settings:
    threads: int = 1
    names: tuple[str, ...] = ()
    output: str = "there"


def test_dataclasses_take_the_flags_of_their_fields() -> None:
    parsed = argparse.Namespace(threads=3, names=["a", "b"], strict=True)
    assert made_of(Settings, parsed, output="here") == Settings(3, ("a", "b"), "here")


def test_new_folders_have_the_time_and_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: form)
    assert new_folder("timm", "training") == Path("results/%Y-%m-%d_%H%M%S_timm_training")


def test_messages_are_one_line_and_give_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert say("a\n  b", 2) == 2
    assert capsys.readouterr().err == "hashbench: a b\n"


class Stream:
    def __init__(self, terminal):
        self.isatty = lambda: terminal


@pytest.mark.parametrize(
    ("stream", "variables", "look"),
    [
        (Stream(True), {}, Look(77, True)),
        (Stream(True), {"NO_COLOR": "1"}, Look(77, False)),
        (Stream(True), {"TERM": "dumb"}, Look(77, False)),
        (Stream(False), {}, Look(None, False)),
        (Stream(False), {"FORCE_COLOR": "1"}, Look(None, True)),
        (Stream(False), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, Look(None, False)),
        (None, {}, Look(None, False)),
    ],
)
def test_width_and_colours_of_streams(monkeypatch, stream, variables, look):
    monkeypatch.setenv("COLUMNS", "77")
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert look_of(stream) == look
