"""Dumps of transformers' debugger: the order of calls, and what it does not write."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.extensions.implementations.dumps.compare import read_dump

transformers = pytest.importorskip("transformers")

TREE = "Model_debug_tree_FULL_TENSORS.json"


class Model(torch.nn.Module):
    """Calls ``b`` before ``a``, and ``a`` twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": self.a(self.a(self.b(x))), "z": (x, "text")}


def dumped(folder: Path, **keywords: Any) -> Path:
    with (
        torch._tensor_str.printoptions(),
        transformers.model_addition_debugger_context(Model(), str(folder), **keywords) as model,
    ):
        model.forward(torch.rand(2, 3))
    return folder


def test_the_order_is_that_of_calls(tmp_path: Path) -> None:
    dump = read_dump(dumped(tmp_path, use_repr=False))
    assert [each.name for each in dump.tensors] == [
        *("Model_inputs_args_0", "b_inputs_args_0", "b_outputs", "a_inputs_args_0", "a_outputs"),
        *("Model_outputs_y", "Model_outputs_z_0"),
    ]
    assert (dump.kind, dump.of_calls) == ("transformers' model debugger", True)
    assert dump.notes == ("a_inputs_args_0, a_outputs: written more than once, the last call alone is in the file.",)
    assert [each.name for each in read_dump(tmp_path / TREE).tensors] == [each.name for each in dump.tensors]


def test_values_that_were_printed_are_not_compared(tmp_path: Path) -> None:
    dumped(tmp_path)
    for path in (tmp_path, tmp_path / TREE, tmp_path / TREE.replace("FULL_TENSORS", "SUMMARY")):
        with pytest.raises(HashbenchError, match=r"nothing was compared\. Run the debugger with use_repr=False"):
            read_dump(path)
    (tmp_path / TREE).unlink()
    with pytest.raises(HashbenchError, match="it has summaries alone"):
        read_dump(tmp_path)


def test_layers_that_were_left_out_stand_where_they_ran(tmp_path: Path) -> None:
    from tests.extensions.implementations.dumps import engines

    whole = [each.name for each in read_dump(engines.debugged(tmp_path / "whole")).tensors]
    pruned = read_dump(engines.debugged(tmp_path / "pruned", prune=True))
    assert [each.name for each in pruned.tensors] == whole
    tree = json.loads((tmp_path / "pruned" / TREE.replace("Model", "LlamaForCausalLM")).read_text(encoding="utf-8"))
    assert "layers.1" not in json.dumps(tree)
    assert "as do_prune_layers has it" in pruned.notes[0]


def _file(folder: Path) -> Path:
    return folder / "Model.b_outputs.safetensors"


def _elsewhere(folder: Path) -> None:
    tree = (folder / TREE).read_text(encoding="utf-8")
    (folder / TREE).write_text(tree.replace("./Model.b_outputs", "../../etc/b"), encoding="utf-8")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda folder: _file(folder).unlink(), "it names Model.b_outputs.safetensors, which is not"),
    "a file was cut": (lambda folder: _file(folder).write_bytes(_file(folder).read_bytes()[:-4]), "it was cut"),
    "the tree was cut": (lambda folder: (folder / TREE).write_text('{"inputs":', encoding="utf-8"), "no tree of calls"),
    "the tree is a list": (lambda folder: (folder / TREE).write_text("[1]", encoding="utf-8"), "no tree of calls"),
    "no tensors": (lambda folder: (folder / TREE).write_text("{}", encoding="utf-8"), "no call in it has a tensor"),
    "files elsewhere": (_elsewhere, "it names b.safetensors, which is not beside it"),
    "two models": (lambda folder: shutil.copy(folder / TREE, folder / f"Other{TREE}"), "it holds 2 models"),
}


@pytest.mark.parametrize(("broken", "said"), BROKEN.values(), ids=BROKEN)
def test_a_broken_dump_is_told(broken: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    broken(dumped(tmp_path, use_repr=False))
    with pytest.raises(HashbenchError, match="so nothing was compared") as error:
        read_dump(tmp_path)
    assert said in str(error.value)
