"""``hashbench numeric`` as a user types it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hashbench import cli

PAGE = Path(__file__).parents[3] / "docs" / "numeric.md"
EXAMPLE = re.search(r"```python\n(# fold\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
SMALL = """
import torch
def before(): return torch.nn.Linear(2, 2)
def inputs(): return (torch.ones(1, 2),)
"""


@pytest.fixture
def numeric(tmp_path, capsys, monkeypatch):
    """Runs the command on a file of this content; the exit code, what it printed, and its one line of error."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(content: str, *options: str) -> tuple[int, str, str]:
        path = tmp_path / "two_models.py"
        path.write_text(content, encoding="utf-8")
        code = cli.main(["numeric", str(path), *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_documentations_example_is_equal_within_tolerance(numeric) -> None:
    code, out, err = numeric(EXAMPLE, "--inference", "--trace")
    assert (code, err) == (0, "")
    documented = PAGE.read_text(encoding="utf-8").partition("--trace\n")[2].partition("\n```")[0]
    assert steady(out) == steady(documented)


def steady(text: str) -> list[str]:
    """The words of a text, without its numbers, which the machine decides, and lines of tables."""
    return re.sub(r"\d[\d.e-]*|-{2,}", "", text).split()


@pytest.mark.slow
def test_the_documentations_python_runs() -> None:
    code = re.search(r"```python\n(import torch\nfrom hashbench.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names: dict[str, object] = {}
    exec(code, names)
    assert names["report"].bitwise


def test_wrong_weight_is_named_as_json(numeric) -> None:
    content = EXAMPLE.replace("    return model\n", "    model[3].weight.data += 1\n    return model\n")
    code, out, _ = numeric(content, "--inference", "--trace", "--json")
    report = json.loads(out)
    assert code == 1
    assert (report["verdict"], report["equal_within_tolerance"]) == (
        "different: outputs differ (1 of 1: output)",
        False,
    )
    assert (
        "beyond tolerance: the parameter 3.weight holds different values (by at most 1"
        in report["parts"][0]["headline"]
    )
    assert [item["name"] for item in report["first_differences"]] == ["parameter/3.weight", "parameter/0.weight"]


def test_both_models_are_built_from_the_same_random_state_and_after_may_take_none(numeric) -> None:
    code, out, _ = numeric(SMALL + "def after(): return torch.nn.Linear(2, 2)\n")
    assert code == 0
    assert out.startswith("The models are equal bit by bit\nparameters:       equal bit by bit (2)\n")


@pytest.mark.slow
def test_precision_and_stages_and_rename_of_the_file_are_heeded(numeric) -> None:
    content = SMALL + "def after(model): return torch.nn.Sequential(model, torch.nn.Threshold(-9.0, 0.0))\n"
    assert numeric(content)[0] == 1
    assert numeric(content + "RENAME = {'weight': '0.weight', 'bias': '0.bias'}\n")[0] == 0
    assert numeric(content + "def rename(name): return '0.' + name\n")[0] == 0
    assert numeric(content, "--stages", "outputs")[0] == 0
    assert numeric(content + "STAGES = ['outputs']\n")[0] == 0
    shifted = SMALL + "def after(model):\n    model.weight.data += 0.01\n    return model\n"
    assert numeric(shifted, "--stages", "parameters,outputs")[0] == 1
    assert numeric(shifted, "--stages", "parameters,outputs", "--precision", "0.1")[0] == 0


def test_model_that_raises_is_a_difference_with_its_side(numeric) -> None:
    code, out, err = numeric(SMALL + "def after(model): return torch.nn.Linear(3, 2)\n")
    assert (code, err) == (1, "")
    assert "raised:           the model after raised at outputs, iteration 0: RuntimeError" in out
    assert "weight" in out
    assert "shape float32[2,2] and float32[2,3]" in out


SAME = SMALL + "def after(m): return m\n"
WRONG = {
    "no functions": ("x = 1", "", "it has no function before. It needs before() and inputs()"),
    "an import that fails": ("1 / 0", "", "its import raised ZeroDivisionError"),
    "an import that exits": ("raise SystemExit(0)", "", "its import raised SystemExit"),
    "no Python": ("def", "", "its import raised SyntaxError"),
    "a model that cannot be built": (SMALL + "def after(m): return m.nothing", "", "after() raised AttributeError"),
    "an after that returns nothing": (SMALL + "def after(m): m.eval()", "", "type NoneType, which is not a model"),
    "no inputs": (SAME + "def inputs(): pass", "", "inputs() returned None"),
    "an after that is no function": (SMALL + "after = 3", "", "its after is a int, not a function"),
    "odd stages": (SAME + "STAGES = 'outputs'", "", "its STAGES is not a tuple of strings"),
    "odd names": (SAME + "RENAME = {1: 2}", "", "its RENAME is not a dict of strings"),
    "an unknown stage": (SAME, "--stages output", "unknown stage 'output'"),
    "an endless tolerance": (SAME, "--precision inf", "precision=inf is not a tolerance"),
    "an unknown form": (SAME, "--ignore stride", "'stride' cannot be ignored"),
    "a name that fits nothing": (SAME + "RENAME = {'a': 'b'}", "", "rename has 'a'"),
    "a place that cannot be written": (SAME, "--html /dev/null/f", "cannot write /dev/null/f"),
}


@pytest.mark.parametrize(("content", "options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_request_is_one_line_and_exit_code_2(numeric, content: str, options: str, message: str) -> None:
    code, _, err = numeric(content, *options.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
