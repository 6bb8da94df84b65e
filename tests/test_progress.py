"""The text of a running sweep on a terminal; elsewhere it is a golden file, progress.txt."""

from __future__ import annotations

import io

import pytest

from hashbench.cli.sweep import Progress, _time_left
from hashbench.devices.visibility import DeviceAssignment
from hashbench.records import Row
from hashbench.sweep.executors import Resources
from hashbench.sweep.run import ModelFinished, ModelRequeued, ModelStarted, SweepOpened, SweepPlanned


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


def test_a_plan_without_threads_names_none():
    stream = io.StringIO()
    Progress(stream)(SweepPlanned(4, None, Resources(devices=(DeviceAssignment({}),) * 2), 7))
    assert stream.getvalue() == "4 models at once on 2 devices; no earlier times\n"


def test_a_model_that_is_put_off_runs_no_more_until_it_starts_again():
    stream = Terminal()
    with Progress(stream) as progress:
        progress(SweepOpened(total=1, done=0, damaged=0))
        progress(ModelStarted(name="vit"))
        progress(ModelRequeued(row=row("vit", "crashed", error="killed by SIGKILL")))
        progress(ModelStarted(name="unet"))
    frames = stream.getvalue().replace("\n", "\r").split("\r")
    assert any("vit  crashed  killed by SIGKILL: runs again alone, after all others" in frame for frame in frames)
    assert not any(frame.rstrip().endswith("vit, unet") for frame in frames)


def test_a_line_end_in_a_name_begins_no_line_of_its_own():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress(ModelFinished(row=row("x\n::error::y", "crashed", error="a\x1bb"), done=1, total=1, eta_seconds=0))
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
