"""``hashbench pipeline`` as its users call it: new interpreters, real workers, and what ends them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hashbench import cli
from hashbench.errors import HashbenchError
from hashbench.processes import variables
from hashbench.tools.pipeline import checking

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "pipeline"


@pytest.mark.slow
def test_the_example_of_the_documentation_repeats_and_its_page_shows_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(
        ["pipeline", "check", "--config", str(EXAMPLE / "training.yaml"), "--output-dir", str(tmp_path / "a")]
    )

    said = capsys.readouterr().out
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    assert code == 0, said
    assert said.partition("\n\nCheck:")[0] in page
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == set(re.findall(r"^\| `([\w./]+)`", page, re.MULTILINE)) | {"check.json"}


HANGS = """
import os, time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with open({pids!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{os.getppid()}}\\n")
        time.sleep(600)
def make_loader(seed):
    return torch.utils.data.DataLoader(Slow(), num_workers=2)
"""


@pytest.mark.slow
def test_a_loader_that_hangs_leaves_no_process_behind_when_the_command_ends(tmp_path: Path) -> None:
    commands = {}
    for ended_by in (signal.SIGINT, signal.SIGKILL):
        folder = tmp_path / ended_by.name
        folder.mkdir()
        (folder / "slow.py").write_text(HANGS.format(pids=str(folder / "pids")), encoding="utf-8")
        arguments = ["pipeline", "check", "--config", "slow.py", "--output-dir", "check"]
        commands[ended_by] = subprocess.Popen(
            [sys.executable, "-m", "hashbench", *arguments], cwd=folder, stderr=subprocess.DEVNULL
        )

    for ended_by, command in commands.items():
        pids = tmp_path / ended_by.name / "pids"
        _until(lambda pids=pids: pids.exists() and pids.read_text().count("\n") >= 2)
        workers = {int(pid) for pid in pids.read_text().split()}
        assert all(map(psutil.pid_exists, workers))
        command.send_signal(ended_by)
        assert command.wait() == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[ended_by]
        _until(lambda workers=workers: not any(_is_alive(pid) for pid in workers))
        assert not (tmp_path / ended_by.name / "check").exists()


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    (tmp_path / "slow.py").write_text(LOADER, encoding="utf-8")

    seconds = 1
    while not (pid.exists() and pid.read_text()):  # a busy machine needs longer to come as far as that
        assert seconds < 200
        with variables({"PYTHONPATH": str(tmp_path)}), pytest.raises(HashbenchError, match=f"more than {seconds} s"):
            checking.check(tmp_path / "slow.py", tmp_path / "check", timeout=seconds)
        assert not (tmp_path / "check").exists()
        seconds *= 3
    assert not _is_alive(int(pid.read_text()))


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------------------------------- the configuration

LOADER = "def make_loader(seed):\n    return []\n"
REFUSED = {
    "pipeline.txt": (LOADER, "neither a Python file"),
    "empty.py": ("", "it has no loader"),
    "two.py": (
        f"from hashbench.tools import pipeline\n{LOADER}@pipeline.loader\ndef f(s): ...",
        "two functions are its",
    ),
    "text_seed.py": (f"{LOADER}seed = 'x'", "seed = 'x' is not a whole number"),
    "no_steps.py": (f"{LOADER}steps = 0", "steps = 0 is not a whole number"),
    "true.py": (f"{LOADER}steps = True", "steps = True is not a whole number"),
    "broken.yaml": ("{", "it is not YAML"),
    "list.yaml": ("- 1", "it is not a list of entries"),
    "unknown.yaml": ("loder: a.py:b", "an unknown entry 'loder'"),
    "nothing.yaml": ("loader: a.py", "make_loader names no function"),
    "missing.yaml": ("loader: missing.py:f", "it does not exist"),
    "nameless.yaml": ("loader: json:nothing", "json has no function 'nothing'"),
    "steps.yaml": ("loader: json:loads\nsteps: 1.5", "steps = 1.5 is not a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_be_used_is_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = REFUSED[name]
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(HashbenchError, match=message) as caught:
        checking.load_config(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_yaml_without_pyyaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "pipeline.yaml").write_text("loader: json:loads")
    with pytest.raises(HashbenchError, match=r"pip install 'hashbench\[pipeline\]'"):
        checking.load_config(tmp_path / "pipeline.yaml")


def test_functions_are_found_by_name_by_decorator_and_through_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts.py").write_text(
        "from hashbench.tools import pipeline\nsteps = 5\n"
        "@pipeline.loader\ndef images(seed, size=1):\n    return [seed] * size\n"
        "@pipeline.seeding\ndef begin(seed):\n    return seed\n"
        "def make_model():\n    return None\n",
        encoding="utf-8",
    )
    (tmp_path / "parts.yaml").write_text(
        "loader: {call: 'parts.py:images', arguments: {size: 3}}\nmodel: parts.py:make_model\nseed: 4\n",
        encoding="utf-8",
    )

    python, yaml = checking.load_config(tmp_path / "parts.py"), checking.load_config(tmp_path / "parts.yaml")
    assert (python.seed, python.steps, set(python.functions)) == (1337, 5, {"make_loader", "make_model", "set_seed"})
    assert (yaml.seed, yaml.steps, set(yaml.functions)) == (4, 3, {"make_loader", "make_model"})
    assert yaml.functions["make_loader"](yaml.seed) == [4, 4, 4]
