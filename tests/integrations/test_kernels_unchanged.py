"""``assert_kernels_unchanged`` of the pytest plug-in: it records when it is asked to, passes where nothing changed, and
names every kernel that changed in the five lines that the documentation shows. Sessions run in this process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hashbench.io import read_json_object

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parent.parent.parent / "docs" / "pytest.md"

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
    net(x).sum().backward()

def test_step(assert_kernels_unchanged):
    assert_kernels_unchanged(step, (Net(), torch.ones(2, 8)), "kernels/step.json")
"""
FORWARD = "torch.relu(self.layer(x)).abs()"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project whose kernels are recorded."""
    write(pytester, FORWARD)
    recorded = run(pytester, "--hashbench-record")
    recorded.assert_outcomes(passed=2)
    said = [line for line in recorded.outlines if line.startswith("hashbench: recorded")]
    assert re.fullmatch(r"hashbench: recorded base\.json: Net, 3 kernels, \d+ bytes", said[0]), said
    assert re.fullmatch(r"hashbench: recorded kernels/step\.json: step, \d+ kernels, \d+ bytes", said[1]), said
    return pytester


def write(pytester: pytest.Pytester, forward: str) -> None:
    pytester.makepyfile(test_kernels=TEST.replace("{forward}", forward))


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short", *arguments)


def messages(result: pytest.RunResult) -> list[str]:
    """What failures said, five lines each."""
    lines = [line.removeprefix("E").strip() for line in result.outlines if line.startswith("E ")]
    return [line.removeprefix("Failed: ") for line in lines]


def test_what_is_as_recorded_passes_and_says_nothing(project: pytest.Pytester) -> None:
    result = run(project)
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("hashbench: recorded*")
    assert read_json_object(project.path / "base.json")["models"][0]["name"] == "Net"


def test_every_changed_kernel_is_named_in_the_five_lines_of_the_documentation(project: pytest.Pytester) -> None:
    upgrade = torch.library.Library("aten", "IMPL")
    try:
        upgrade.impl("relu", lambda x: 2 * x.clamp(min=0), "CPU")
        upgrade.impl("abs", lambda x: 3 * x.neg(), "CPU")
        result = run(project, "--hashbench-output=kept", "-k", "test_net")
    finally:
        upgrade._destroy()
    result.assert_outcomes(failed=1)
    said = messages(result)
    shown = DOCS.read_text(encoding="utf-8").partition("changed since base.json")
    documented = "".join((shown[0].rpartition("```text\n")[2], *shown[1:])).partition("\n```")[0].splitlines()
    assert said == documented
    assert "aten.relu.default(float32[2,8])" in (project.path / said[-1].rpartition(" ")[2]).read_text()


def test_other_kernels_of_the_model_are_no_pass(project: pytest.Pytester) -> None:
    write(project, FORWARD.replace("abs", "tan"))
    result = run(project, "-k", "test_net")
    result.assert_outcomes(failed=1)
    said = messages(result)
    assert said[0].startswith("Net: 0 of 3 kernels changed since base.json was recorded")
    assert said[3] == (
        "the others: 3 the same; it now calls kernels that were not recorded (aten.tan.default); "
        "it no longer calls recorded ones (aten.abs.default)"
    )


def test_nothing_is_recorded_unless_asked_for(project: pytest.Pytester) -> None:
    (project.path / "base.json").unlink()
    result = run(project)
    result.assert_outcomes(failed=1, passed=1)
    (said,) = messages(result)
    assert said == "Net: there is no base.json, so nothing was compared. Record it: `pytest --hashbench-record`."
    assert not (project.path / "base.json").exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(lambda text: text[: len(text) // 2], "cannot read", id="truncated"),
        pytest.param(lambda text: text.replace("Net", "Nets"), "its checksum is another", id="changed"),
        pytest.param(
            lambda text: re.sub(r'"schema":\d+', '"schema":99', text), "it is of schema 99", id="of a later schema"
        ),
    ],
)
def test_a_file_that_cannot_be_used_fails(project: pytest.Pytester, damage, expected) -> None:
    path = project.path / "base.json"
    path.write_text(damage(path.read_text()))
    result = run(project, "-k", "test_net")
    result.assert_outcomes(failed=1)
    assert expected in " ".join(messages(result))


def test_a_file_of_another_function_fails(project: pytest.Pytester) -> None:
    (project.path / "kernels" / "step.json").write_bytes((project.path / "base.json").read_bytes())
    result = run(project, "-k", "test_step")
    result.assert_outcomes(failed=1)
    assert "step.json holds no fingerprint of step" in " ".join(messages(result))
