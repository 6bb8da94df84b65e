"""``watch resume SCRIPT.py``: three runs of one script."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.extensions.watch import rerun
from hashbench.extensions.watch.resume import lost_words

SCRIPT = Path(__file__).parent / "resumable.py"

pytestmark = pytest.mark.slow


def test_a_script_is_run_stopped_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSES", "generator")
    verdict = rerun.resume(SCRIPT, (), at=6, output=tmp_path / "out", steps=11)
    assert list(map(lost_words, verdict.lost)) == ["generator torch: its state"]
    assert verdict.steps == tuple(range(6, 6 + 11))
    assert verdict.gaps == ()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("resumed", "resumed.log", "resumed.watch", "stopped.log"),
        *("stopped.watch", "uninterrupted", "uninterrupted.log", "uninterrupted.watch"),
    ]


def written(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    loop = "import os, sys, torch, hashbench\nmodel = torch.nn.Linear(2, 1)\n" + body
    path.write_text(loop, encoding="utf-8")
    return path


LOOP = """
torch.manual_seed(SEED)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hashbench.watch("w", model=model):
    for _ in range(9):
        model(torch.rand(1, 2)).sum().backward()
        optimizer.step()
"""


COUNTED = (
    LOOP.replace("SEED", "0")
    .replace("lr=0.1", "lr=0.1, momentum=0.9")
    .replace("model=model)", "model=model, optimizer=optimizer, start=0)")
    .replace("with ", "if os.path.exists('saved'):\n    model.load_state_dict(LOADED)\nwith ")
    + "        torch.save(model.state_dict(), 'saved')\n"
)
"""A script that goes on with the weights alone, as if from the first step."""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ZeroDivisionError('mine')", r"failed in its uninterrupted run: .*ZeroDivisionError: mine"),
        ("pass", "recorded nothing in its uninterrupted run"),
        (LOOP.replace("SEED", "0"), "began anew"),
        (COUNTED.replace("LOADED", "{'weight': torch.ones(1, 2), 'bias': torch.ones(1)}"), "never had the parameters"),
        (LOOP.replace("SEED", "os.getpid()"), "the runs differ before step 2, where nothing was resumed yet"),
    ],
)
def test_what_cannot_be_judged_is_one_line(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(HashbenchError, match=words) as raised:
        rerun.resume(written(tmp_path, body), (), at=2, output=tmp_path / "out")
    assert "\n" not in str(raised.value)


def test_a_run_that_goes_on_with_the_weights_alone_is_judged(tmp_path: Path) -> None:
    script = written(tmp_path, COUNTED.replace("LOADED", "torch.load('saved')"))
    verdict = rerun.resume(script, (), at=2, output=tmp_path / "out")
    assert (verdict.at, [one.part for one in verdict.lost]) == (2, ["generator", "state", "batch"])


def test_a_folder_that_exists_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="cannot make the folder"):
        rerun.resume(SCRIPT, (), at=2, output=tmp_path)


def test_an_argument_places_the_run(tmp_path: Path) -> None:
    body = "import pathlib\npathlib.Path(sys.argv[1], 'seen').write_text(os.getcwd())\nraise SystemExit(3)"
    with pytest.raises(HashbenchError, match="failed"):
        rerun.resume(written(tmp_path, body), ("{run}",), at=2, output=tmp_path / "out")
    assert (tmp_path / "out" / "uninterrupted" / "seen").read_text() == str(Path.cwd())
