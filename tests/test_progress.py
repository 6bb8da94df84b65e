"""The text of a running sweep, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from hashbench.progress import Progress, _time_left
from hashbench.records import Row
from hashbench.sweep import ModelFinished, ModelStarted, SweepOpened


class Terminal(io.StringIO):
    def isatty(self):
        return True


def row(name, accuracy="pass", **fields):
    return Row(dev="cpu", name=name, batch_size=1, accuracy=accuracy, **fields)


EVENTS = [
    SweepOpened(total=4, done=1, damaged=1),
    ModelStarted(name="resnet18"),
    ModelStarted(name="vit"),
    ModelFinished(row=row("resnet18", seconds=3.21), done=2, total=4, eta_seconds=40),
    ModelStarted(name="unet"),
    ModelFinished(row=row("vit", "eager_two_runs_differ", kernel="aten::index_put"), done=3, total=4, eta_seconds=20),
    ModelFinished(row=row("unet", "crashed", error="killed by SIGSEGV"), done=4, total=4, eta_seconds=0),
]


def shown(stream):
    with Progress(stream) as progress:
        for event in EVENTS:
            progress(event)
    return stream.getvalue()


def test_without_a_terminal_each_finished_model_is_a_line():
    assert shown(io.StringIO()).splitlines() == [
        "1 of 4 rows are there already; 1 damaged row files were thrown away and their models run again",
        "[2/4] resnet18  pass  3.2 s",
        "[3/4] vit  eager_two_runs_differ  aten::index_put",
        "[4/4] unet  crashed  killed by SIGSEGV",
    ]


def test_a_terminal_shows_what_runs_the_time_left_and_what_went_wrong():
    text = shown(Terminal())
    frames = text.replace("\n", "\r").split("\r")
    assert any("resnet18, vit" in frame and "1/4" in frame for frame in frames)
    assert any(frame.rstrip().endswith("vit, unet") and "40 s left" in frame for frame in frames)
    assert any(frame.strip() == "vit  eager_two_runs_differ  aten::index_put" for frame in frames)
    assert not any("resnet18  pass" in frame for frame in frames)


def test_a_closed_stream_does_not_end_the_sweep():
    stream = io.StringIO()
    progress = Progress(stream)
    stream.close()
    for event in EVENTS:
        progress(event)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s left"), (89, "89 s left"), (90, "2 min left"), (5399, "90 min left"), (12600, "3.5 h left")],
)
def test_time_left(seconds, text):
    assert _time_left(seconds) == text
