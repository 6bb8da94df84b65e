"""A status, a cause, an experiment and a column, each added in at most two files of a copy of hashbench.

The copy runs in a process of its own, and what is new has to be seen in every output that should show it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hashbench

PACKAGE = Path(hashbench.__file__).parent

BEGIN = """
import dataclasses, json, pathlib, torch
from tests.experiment_texts import evidence, result
from tests.report.histories import DIAGNOSED, failed, judged, passing
from tests.report.rows import row, sweep, write_rows
from hashbench.causes import decide
from hashbench.text import five_lines
from hashbench.records import *
from hashbench.report.compare import compare
from hashbench.report.page import render_html
from hashbench.report.exports import as_junit, as_markdown
from hashbench.report.text import as_json, sweep_table
from hashbench.repro import report
from hashbench.results.rows import read_rows, row_from_json, row_to_json
from tests.repro_helpers import aten, captured


def outputs(bad):
    night = judged([passing(bad)], [bad])
    write_rows(pathlib.Path("accuracy.csv"), [bad])
    assert read_rows(pathlib.Path("accuracy.csv")) == [bad]
    assert row_from_json(json.loads(json.dumps(row_to_json(bad)))) == bad
    return {
        "csv": pathlib.Path("accuracy.csv").read_text(),
        "table": sweep_table([bad]),
        "compared": as_json(compare(sweep(passing(bad)), sweep(bad))),
        "page": render_html(night),
        "junit": as_junit(night),
        "markdown": as_markdown(night),
        "pytest": five_lines(bad, folder=pathlib.Path("kept")),
    }


def shown(text, found, *names):
    for name in names:
        assert text in found[name], (text, name, found[name])
"""

ADDED = {
    "status": (
        {
            "catalog.py": (
                '    CRASHED = "crashed", Kind.FAIL',
                '    QUOTA = "over_quota", Kind.FAIL, "Q", "over quota", "it used more than it was given"\n',
            )
        },
        """
        found = outputs(failed("net", "over_quota", "9 GiB of 8"))
        shown("over_quota", found, *(name for name in found if name != "pytest"))
        shown("it used more than it was given", found, "page")
        shown(">Q<", found, "page")
        """,
    ),
    "cause": (
        {
            "catalog.py": (
                '    Cause(\n        "write_race",',
                '    Cause("cosmic_ray", "A bit was flipped from outside.", "Move below ground", in_kernel=True),\n',
            ),
            "causes/rules.py": (
                "_INSIDE: tuple[Rule, ...] = (\n",
                "def _flipped(evidence: Evidence) -> Decision | None:\n"
                '    moved = evidence.arm("moved", "call")\n'
                '    if moved.found != "a bit":\n'
                "        return None\n"
                '    return decision(evidence, "cosmic_ray", PROVEN, in_words(moved))\n'
                "\n\n",
                "    _library,\n)",
                "    _flipped,\n",
            ),
        },
        """
        results = tuple(map(result, ("call/repeat 20/20", "call/moved 20/20 [a bit]")))
        decided = decide(Evidence("kernel", call=CallFacts("op"), arms=results))
        assert (decided.cause, decided.confidence) == ("cosmic_ray", "proven"), decided
        assert decided.advice.startswith("Move below ground")
        fields = dataclasses.asdict(decided)
        found = outputs(dataclasses.replace(DIAGNOSED, **fields, evidence=RowEvidence.of(results)))
        shown("cosmic_ray", found, *found)
        shown("A bit was flipped from outside.", found, "page")
        shown("Move below ground", found, *(name for name in found if name != "table"))
        call = captured(aten.add.Tensor, torch.ones(3), torch.ones(3))
        text = report(call, Diagnosis(decided, Evidence("kernel", arms=results)), here={})
        assert "**cosmic ray**, proven: an experiment shows the mechanism." in text
        """,
    ),
    "experiment": (
        {
            "catalog.py": (
                '    Experiment("deterministic", _CALL',
                '    Experiment("low_power", _CALL, "at a low clock rate", Role.STEADY, "contention"),\n',
            ),
            "replay/methods.py": (
                '    "one_thread": Around(',
                '    "low_power": Around(nullcontext),\n',
            ),
        },
        """
        results = tuple(map(result, ("call/repeat 20/20", "call/low_power 0/20")))
        decided = decide(Evidence("kernel", call=CallFacts("op"), arms=results))
        assert (decided.cause, decided.confidence) == ("contention", "proven"), decided
        assert decided.because == "20 of 20 unmodified replays differ; 0 of 20 at a low clock rate"
        found = outputs(dataclasses.replace(DIAGNOSED, evidence=RowEvidence.of(results)))
        shown("call/low_power 0/20", found, *(name for name in found if name not in ("table", "page")))
        shown("at a low clock rate", found, "page")
        call = captured(aten.add.Tensor, torch.ones(3), torch.ones(3))
        text = report(call, Diagnosis(decided, Evidence("kernel", arms=results)), here={})
        assert "at a low clock rate" in text
        from hashbench import replay
        from hashbench.processes import Budget
        made = replay.experiments(call, replays=3, budget=Budget(60.0), arms=("low_power",))
        assert made.arm("low_power").trials == 3, made.arms
        """,
    ),
    "column": (
        {
            "records.py": ('    advice: str = ""\n    repro: str', '    governor: str = labelled("Governor")\n'),
            "check/pair.py": ('        traces=" ".join(traces),\n', '        governor="powersave",\n'),
        },
        """
        found = outputs(dataclasses.replace(DIAGNOSED, governor="powersave"))
        shown("governor", found, "csv", "compared")
        shown("powersave", found, "csv", "compared", "page")
        shown("Governor", found, "page")
        from hashbench.check.pair import row_of
        from hashbench.run.outcome import Outcome
        made = row_of(ModelSpec("zoo", "net"), RunOptions(), Outcome("pass", "on"), seconds=None)
        assert made.governor == "powersave"
        """,
    ),
}
"""What is added: by file, before which words it goes and what it is; and what then holds."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADDED)
def test_what_is_added_in_two_files_is_seen_wherever_it_should_be(kind: str, tmp_path: Path) -> None:
    edits, script = ADDED[kind]
    assert len(edits) <= 2
    copy = tmp_path / "copy" / "hashbench"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "models"))
    for name, changes in edits.items():
        text = (copy / name).read_text(encoding="utf-8")
        for before, new in zip(changes[::2], changes[1::2], strict=True):
            assert text.count(before) == 1, f"{name}: {before}"
            text = text.replace(before, new + before)
        (copy / name).write_text(text, encoding="utf-8")
    lines = "\n".join(line.removeprefix(" " * 8) for line in script.splitlines())
    paths = [str(copy.parent), str(PACKAGE.parent)]
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + lines],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
