"""The text of a running sweep on a terminal; elsewhere it is a golden file, progress.txt."""

from __future__ import annotations

import gc
import io
import re
import sys
from dataclasses import replace

import pytest

from hashbench.cli.flags import phases_shown
from hashbench.cli.sweep import Progress, _time_left
from hashbench.core.devices.visibility import DeviceAssignment
from hashbench.core.processes import phases_told_to, tell_phase
from hashbench.core.records import Row
from hashbench.core.sweep.executors import Resources
from hashbench.core.sweep.run import ModelFinished, ModelLost, ModelRequeued, ModelStarted, SweepOpened, SweepPlanned


class Terminal(io.StringIO):
    def isatty(self):
        return True


def row(name, accuracy="pass", **fields):
    return Row(dev="cpu", name=name, batch_size=1, accuracy=accuracy, **fields)


EVENTS = [
    SweepOpened(total=4, done=1, unreadable=("rows/x.json.unreadable",)),
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
    return stream.getvalue() if stream is not None else ""


def test_a_terminal_shows_what_runs_the_time_left_and_what_went_wrong():
    text = shown(Terminal())
    frames = text.replace("\n", "\r").split("\r")
    assert any("resnet18, vit" in frame and "1/4" in frame for frame in frames)
    assert any(frame.rstrip().endswith("vit, unet") and "40 s left" in frame for frame in frames)
    assert any(frame.strip() == "vit  eager_two_runs_differ  aten::index_put" for frame in frames)
    assert not any("resnet18  pass" in frame for frame in frames)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def shown_at(stream, *moments, events=EVENTS[:2], phases=()):
    """What is shown where ticks come at ``moments``, at which ``resnet18`` is in the phase of the same place."""
    clock, phase = Clock(), iter(phases)
    told = []
    progress = Progress(stream, clock=clock)
    for event in events:
        progress(replace(event, phase=lambda: told[-1] if told else "") if isinstance(event, ModelStarted) else event)
    for clock.now in moments:
        told += [next(phase, "")]
        before = len(stream.getvalue())
        progress.tick()
        yield stream.getvalue()[before:].replace("\r", "\n").strip().splitlines()


def test_a_terminal_shows_the_phase_and_the_time_at_every_tick():
    frames = shown_at(Terminal(), 1, 2, 3, phases=["loading", "slot_memory: run 1", "slot_memory: run 2"])
    assert [frame[-1].split("] ")[1] for frame in frames] == [
        "resnet18 (loading)",
        "resnet18 (slot_memory: run 1, 2 s)",
        "resnet18 (slot_memory: run 2, 3 s)",
    ]


def test_before_the_sweep_opens_a_terminal_shows_that_something_goes_on():
    assert list(shown_at(Terminal(), 1, 7, events=())) == [[f"looking at this machine ({n} s)"] for n in (1, 7)]
    assert list(shown_at(io.StringIO(), 1, 70, events=())) == [[], []]


def test_the_time_left_goes_down_between_two_models_and_is_not_said_when_it_is_overdrawn():
    frames = list(shown_at(Terminal(), 10, 30, 50, 100, events=EVENTS[:5]))
    assert [re.search(r", (\d+) s left", frame[-1])[1] for frame in frames[:2]] == ["30", "10"]
    assert "left" not in frames[-1][-1], "two models run, and nothing waits"


def test_off_a_terminal_a_long_model_has_a_line_every_half_minute_and_at_new_stages():
    phases = {5: "run 1 of 2", 29: "run 2 of 2", 30: "run 2 of 2", 35: "clocks: run 1", 40: "clocks: run 9"}
    phases |= {41: "clocks: run 10", 69: "clocks: run 40", 70: "clocks: run 41"}
    lines = dict(zip(phases, shown_at(io.StringIO(), *phases, phases=phases.values()), strict=True))
    assert {moment: line for moment, line in lines.items() if line} == {
        30: ["[1/4] running: resnet18 (run 2 of 2, 30 s)"],
        40: ["[1/4] running: resnet18 (clocks: run 9, 40 s)"],
        70: ["[1/4] running: resnet18 (clocks: run 41, 70 s)"],
    }


def test_without_a_standard_error_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    shown(None)


def test_phases_are_told_to_who_listens_and_to_nobody_else():
    told = []
    tell_phase("before")
    with phases_told_to(told.append):
        tell_phase("run 1 of 2")
    tell_phase("after")
    assert told == ["run 1 of 2"]


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), "experiments 2/9: one_thread"), (io.StringIO(), "")])
def test_what_one_command_is_doing_is_shown_on_a_terminal_alone_and_goes_again(monkeypatch, stream, shown):
    monkeypatch.setattr(sys, "stderr", stream)
    with phases_shown():
        tell_phase("experiments 2/9: one_thread")
        before = stream.getvalue()
    assert before.strip("\r").removesuffix("\x1b[K") == shown
    assert stream.getvalue().removeprefix(before) == ("\r\x1b[K" if shown else "")


def test_a_closed_stream_does_not_end_the_sweep():
    stream = io.StringIO()
    progress = Progress(stream)
    stream.close()
    for event in EVENTS:
        progress(event)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s left"), (89, "89 s left"), (100, "2 min left"), (5300, "88 min left"), (12600, "3 h 30 min left")],
)
def test_time_left(seconds, text):
    assert _time_left(seconds) == text


def test_a_plan_without_threads_names_none():
    stream = io.StringIO()
    Progress(stream)(SweepPlanned(4, None, Resources(devices=(DeviceAssignment({}),) * 2), 7))
    assert stream.getvalue() == "4 models at once on 2 devices; no earlier times\n"


def test_a_model_that_is_put_off_runs_no_more_until_it_starts_again():
    gc.collect()  # the bar of another test that ends while tqdm writes would be an error of tqdm
    stream = Terminal()
    with Progress(stream) as progress:
        progress(SweepOpened(total=1, done=0))
        progress(ModelStarted(name="vit"))
        progress(ModelRequeued(row=row("vit", "crashed", error="killed by SIGKILL")))
        progress(ModelStarted(name="unet"))
    frames = stream.getvalue().replace("\n", "\r").split("\r")
    assert any("vit  crashed  killed by SIGKILL: runs again alone, after all others" in frame for frame in frames)
    assert not any(frame.rstrip().endswith("vit, unet") for frame in frames)


def test_a_model_of_which_nothing_is_known_runs_no_more():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress(ModelLost(name="v\nit", reason="its machine died", again=True))
        progress(ModelLost(name="vit", reason="its machine died", again=False))
    assert stream.getvalue() == "v it: its machine died; runs again\nvit: its machine died; left without a row\n"


def test_an_error_of_a_few_sentences_is_not_cut():
    error = "the results of two runs cannot be compared: " + "output is of a kind that has no content; " * 6
    stream = io.StringIO()
    Progress(stream)(ModelFinished(row=row("x", "crashed", error=error), done=1, total=1, eta_seconds=0))
    assert error.strip() in stream.getvalue()


def test_a_line_end_in_a_name_begins_no_line_of_its_own():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress(ModelFinished(row=row("x\n::error::y", "crashed", error="a\x1bb"), done=1, total=1, eta_seconds=0))
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
