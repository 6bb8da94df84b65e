"""``assert_kernels_unchanged`` of the pytest plug-in: it records when it is asked to, passes where nothing changed, and
names every kernel that changed in the report that the documentation shows. Sessions run in this process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hashbench.extensions.fingerprint import document

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parents[3] / "docs" / "pytest.md"

TEST = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.eye_(self.layer.weight)

    def forward(self, x):
        return {forward}

def test_net(assert_kernels_unchanged):
    assert_kernels_unchanged(Net(), torch.ones(2, 8), "base.json", threads=1)

def step(net, x):
    (net(x) * torch.rand_like(x)).sum().backward()

def test_step(assert_kernels_unchanged):
    assert_kernels_unchanged(step, (Net(), torch.ones(2, 8)), "kernels/step.json")
"""
FORWARD = "torch.relu(self.layer(x)).abs()"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose kernels are recorded."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # it is part of the names of folders
    write(pytester, FORWARD)
    recorded = run(pytester, "--hashbench-record")
    recorded.assert_outcomes(passed=2)
    said = [line for line in recorded.outlines if line.startswith("hashbench: recorded")]
    assert re.fullmatch(r"hashbench: recorded base\.json: Net, 3 kernels, \d+ bytes", said[0]), said
    assert re.fullmatch(r"hashbench: recorded kernels/step\.json: step, \d+ kernels, \d+ bytes", said[1]), said
    return pytester


def write(pytester: pytest.Pytester, forward: str, *, name: str = "test_kernels") -> None:
    pytester.makepyfile(**{name: TEST.replace("{forward}", forward)})


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short", *arguments)


def message(result: pytest.RunResult) -> str:
    """What failures said, with single spaces between words."""
    lines = [line.removeprefix("E").strip() for line in result.outlines if line.startswith("E ")]
    return " ".join(" ".join(line.removeprefix("Failed: ") for line in lines).split())


@contextlib.contextmanager
def upgraded(**kernels: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Kernels of torch are other ones."""
    upgrade = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            upgrade.impl(name, kernel, "CPU")
        yield
    finally:
        upgrade._destroy()


def test_what_is_as_recorded_passes_and_says_nothing(project: pytest.Pytester) -> None:
    result = run(project)
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("hashbench: recorded*")
    assert document.read(project.path / "base.json").models[0].name == "Net"


def test_the_report_is_that_of_the_documentation(project: pytest.Pytester) -> None:
    with upgraded(relu=lambda x: 2 * x.clamp(min=0), abs=lambda x: 3 * x.neg()):
        result = run(project, "--hashbench-output=kept", "-k", "test_net")
    result.assert_outcomes(failed=1)
    said = message(result)
    shown = DOCS.read_text(encoding="utf-8").partition("changed since base.json")
    documented = "".join((shown[0].rpartition("```text\n")[2], *shown[1:])).partition("\n```")[0]
    assert said == " ".join(documented.split())
    kept = said.partition("each kernel: ")[2].split()[0]
    assert "aten.relu.default(float32[2,8])" in (project.path / kept).read_text()


def test_other_kernels_of_the_model_are_no_pass(project: pytest.Pytester) -> None:
    new, gone = "not recorded: aten.tan.default", "no longer called: aten.abs.default"
    other = {"tan": f"{new} {gone}", "abs().tan": new, "relu": gone}
    for number, (ops, expected) in enumerate(other.items()):
        write(project, FORWARD.replace("abs", ops), name=f"test_{number}")
        result = run(project, "-k", "test_net", f"test_{number}.py")
        result.assert_outcomes(failed=1)
        what = "Net: 0 of 3 kernels changed since base.json was recorded"
        assert message(result).startswith(f"{what} {expected} environment: the same as recorded the same: 3 ")


def test_a_kernel_that_cannot_be_run_any_more_is_no_pass(project: pytest.Pytester) -> None:
    with upgraded(abs=lambda x: x.clone() if (x == 1).all() else x[len(x)]):
        result = run(project, "-k", "test_net")
    result.assert_outcomes(failed=1)
    assert " the same: 2 not compared: 1 (aten.abs.default): " in message(result)


def test_kernels_have_as_many_threads_as_when_they_were_recorded(pytester: pytest.Pytester) -> None:
    write(pytester, FORWARD)
    before = torch.get_num_threads()
    with upgraded(abs=lambda x: x * torch.get_num_threads()):
        try:
            torch.set_num_threads(before + 2)
            run(pytester, "--hashbench-record").assert_outcomes(passed=2)
        finally:
            torch.set_num_threads(before)
        run(pytester, "-k", "test_step").assert_outcomes(passed=1)


def test_a_file_of_another_device_fails(project: pytest.Pytester) -> None:
    path = project.path / "base.json"
    recorded = document.read(path)
    models = tuple(replace(model, device="cuda") for model in recorded.models)
    document.write(path, replace(recorded, models=models))
    result = run(project, "-k", "test_net")
    result.assert_outcomes(failed=1)
    assert "it was recorded on cuda, and this runs on cpu" in message(result)


def test_nothing_is_recorded_unless_asked_for(project: pytest.Pytester) -> None:
    (project.path / "base.json").unlink()
    result = run(project)
    result.assert_outcomes(failed=1, passed=1)
    assert (
        message(result)
        == "Net: there is no base.json, so nothing was compared. Record it: `pytest --hashbench-record`."
    )
    assert not (project.path / "base.json").exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "it is truncated", id="truncated"),
        pytest.param(lambda text: text.replace("Net", "Nets"), "its checksum differs", id="changed"),
        pytest.param(
            lambda text: re.sub(r'"schema":\d+', '"schema":99', text),
            "it has schema version 99",
            id="of a later schema",
        ),
    ],
)
def test_a_file_that_cannot_be_used_fails(project: pytest.Pytester, damage, expected) -> None:
    path = project.path / "base.json"
    path.write_text(damage(path.read_text()))
    result = run(project, "-k", "test_net")
    result.assert_outcomes(failed=1)
    assert expected in message(result)


def test_a_file_of_another_function_fails(project: pytest.Pytester) -> None:
    (project.path / "kernels" / "step.json").write_bytes((project.path / "base.json").read_bytes())
    result = run(project, "-k", "test_step")
    result.assert_outcomes(failed=1)
    assert "step.json holds no fingerprint of step" in message(result)
