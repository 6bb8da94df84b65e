"""The configuration of a pipeline, and the time limit of its run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.processes import variables
from hashbench.tools.pipeline import checking
from tests.tools.pipeline.pipeline_helpers import is_alive


@pytest.mark.slow
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
    assert not is_alive(int(pid.read_text()))


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
    if name.endswith(".yaml"):
        pytest.importorskip("yaml", reason="comes with the extra pipeline")
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
    pytest.importorskip("yaml", reason="comes with the extra pipeline")
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
