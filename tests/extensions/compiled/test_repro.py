"""The repro of a result that rounding does not explain: aten ops as text, and a script that prints the ratio."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from hashbench import cli
from hashbench.core.diagnose.repro.call_arguments import BadCallError
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import Finished, new_python
from hashbench.extensions.compiled.repro import (
    BlamedCall,
    ExpectedResult,
    captured_inputs,
    function_of,
    write_accuracy_repro,
)
from tests.kernel_helpers import FakeKernel, Scatter, added, call_of, captured_kernel

aten: Any = torch.ops.aten


def layers(graph: Graph) -> tuple[list[Node], list[Node]]:
    """A product, an activation, and a sum: inputs and ops."""
    x, weight = graph.placeholder("x"), graph.placeholder("lambda_")
    product = graph.call_function(aten.mm.default, (x, weight))
    active = graph.call_function(aten.relu.default, (product,))
    total = graph.call_function(aten.sum.dim_IntList, (active, [1]), {"dtype": torch.float64})
    return [x, weight], [product, active, total]


def run(text: str, *values: Any) -> Any:
    names: dict[str, Any] = {"torch": torch, "math": math, "operator": operator}
    exec(text, names)
    return names["subgraph"](*values)


# ------------------------------------------------------------------------------------------------------- the text


def test_ops_are_written_in_order_and_run() -> None:
    inputs, ops = layers(Graph())
    text = function_of(ops, inputs, ops[1:])
    assert text.splitlines()[:2] == [
        "def subgraph(x, lambda_):",
        "    mm_default = torch.ops.aten.mm.default(x, lambda_)",
    ]
    assert "torch.ops.aten.sum.dim_IntList(relu_default, [1], dtype=torch.float64)" in text
    x, weight = torch.randn(3, 4), torch.randn(4, 2)
    active, total = run(text, x, weight)
    assert torch.equal(active, (x @ weight).relu())
    assert torch.equal(total, active.sum(1, dtype=torch.float64))


def written_in_place(graph: Graph) -> tuple[list[Node], list[Node]]:
    x, at = graph.placeholder("x"), graph.placeholder("at")
    put = graph.call_function(aten.index_put_.default, (x, [at], x, True))
    return [x, at], [put, graph.call_function(aten.add.Tensor, (x, put))]


def test_what_an_op_writes_is_copied_first() -> None:
    inputs, ops = written_in_place(Graph())
    text = function_of(ops, inputs, ops[1:])
    assert "index_put__default = torch.ops.aten.index_put_.default(x.clone(), [at], x.clone(), True)" in text
    x = torch.ones(3)
    (total,) = run(text, x, torch.arange(3))
    assert (x.tolist(), total.tolist()) == ([1, 1, 1], [3, 3, 3])


def test_later_readers_read_what_was_written() -> None:
    inputs, ops = written_in_place(Graph())
    text = function_of(ops, inputs, ops[1:], operand=lambda node, read: ops[0] if node is ops[1] else read)
    assert "torch.ops.aten.add.Tensor(index_put__default, index_put__default)" in text


def of_sizes(graph: Graph) -> tuple[list[Node], list[Node]]:
    x, size = graph.placeholder("x"), graph.placeholder("s0")
    half = graph.call_function(operator.floordiv, (size, 2))
    parts = graph.call_function(aten.split.Tensor, (x, half))
    return [x, size], [half, parts, graph.call_function(operator.getitem, (parts, 1))]


def test_sizes_and_pieces_are_pythons() -> None:
    inputs, ops = of_sizes(Graph())
    text = function_of(ops, inputs, ops[2:])
    assert "operator.floordiv(s0, 2)" in text
    assert "operator.getitem(split_tensor, 1)" in text
    assert run(text, torch.arange(4), 4)[0].tolist() == [2, 3]


def test_names_of_the_script_are_left_to_it() -> None:
    graph = Graph()
    x = graph.placeholder("torch")
    text = function_of([graph.call_function(aten.neg.default, (x,))], [x], [x])
    assert text.startswith(f"def subgraph({x.name}_):" if x.name == "torch" else f"def subgraph({x.name}):")
    assert run(text, torch.ones(1))[0].tolist() == [1]


def unknown_function(graph: Graph) -> list[Node]:
    return [graph.call_function(print, (1,)), graph.call_function(lambda: 1, ())]


def missing_input(graph: Graph) -> list[Node]:
    return [graph.call_function(aten.neg.default, (graph.placeholder("y"),))]


def odd_argument(graph: Graph) -> list[Node]:
    return [graph.call_function(aten.neg.default, (object(),))]


@pytest.mark.parametrize("made", [unknown_function, missing_input, odd_argument])
def test_what_cannot_be_written_is_said(made: Callable[[Graph], Sequence[Node]]) -> None:
    with pytest.raises(BadCallError):
        function_of(made(Graph()), [], [])


# ------------------------------------------------------------------------------------------------------ the script


def blamed(*, scale: float = 1.0, **changes: Any) -> BlamedCall:
    """A product in float32 whose reference is ``scale`` times the right one."""
    x, weight = torch.randn(3, 4), torch.randn(4, 2)
    inputs, ops = layers(Graph())
    reference = (x.double() @ weight.double()).relu()
    allowed = (reference.abs() + 1) * 2**-22
    found = ExpectedResult("buf'1", 0, reference * scale, allowed, eager=0.84)
    call = captured_inputs("mm_relu", [x, weight])
    return replace(BlamedCall(call, (found,), function_of(ops[:2], inputs, ops[1:2]), stage="decomposition"), **changes)


def done(folder: Path) -> Finished:
    code = "import runpy, sys; sys.path[:0] = []; runpy.run_path(sys.argv[1], run_name='__main__')"
    return new_python(code, str(folder / "repro.py"), seconds=600)


def ratio_of(finished: Finished) -> float:
    found = re.search(r"largest ratio (\S+), limit 16", finished.stdout)
    assert found is not None, finished
    return float(found[1])


def test_script_says_what_is_wrong_in_its_first_lines(tmp_path: Path) -> None:
    write_accuracy_repro(tmp_path / "repro", blamed(op="aten.mm.default", semantic="yes"), seen_in="in the model net")
    said = " ".join((ast.get_docstring(ast.parse((tmp_path / "repro" / "repro.py").read_text())) or "").split())
    assert said.startswith("mm_relu gives results that rounding does not explain. In the model net.")
    assert "It computes aten.mm.default. Stage of the compiler: decomposition." in said
    assert "The mistake also shows in float64: yes." in said
    assert "It needs torch alone." in said
    assert {path.name for path in (tmp_path / "repro").iterdir()} == {"repro.py", "tensors.pt"}
    assert (torch.load(tmp_path / "repro" / "tensors.pt", weights_only=True)["references"][0].dtype) is torch.float64


def test_folder_with_a_kernel_has_its_source(tmp_path: Path) -> None:
    call = call_of(FakeKernel(added, filled=(1,)))
    one = torch.zeros(2, dtype=torch.float64)
    kernel = BlamedCall(call, (ExpectedResult("buf0", 1, one, one + 1),))
    write_accuracy_repro(tmp_path / "repro", kernel)
    text = (tmp_path / "repro" / "repro.py").read_text()
    ast.parse(text)
    assert '    ("buf0", 1, None),\n'.replace('"', "'") in text
    assert "out = kernel(t[0], t[1])\n" in text
    assert "for place in [1]:" in text
    assert (tmp_path / "repro" / "kernel.cpp").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"function": ""}, "the C++ of its kernel is gone"),
        (
            {"results": (ExpectedResult("x", 0, torch.ones(2), torch.ones(3)),)},
            "different shape than its allowed error",
        ),
    ],
)
def test_what_cannot_be_repeated_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(HashbenchError) as raised:
        write_accuracy_repro(tmp_path / "repro", blamed(**changes))
    assert said in str(raised.value)
    assert not (tmp_path / "repro").exists()


def test_result_that_is_no_argument_is_refused(tmp_path: Path) -> None:
    one = torch.ones(2, dtype=torch.float64)
    kernel = BlamedCall(call_of(FakeKernel(added)), (ExpectedResult("buf0", 7, one, one),))
    with pytest.raises(HashbenchError, match="buf0 is no argument of the kernel"):
        write_accuracy_repro(tmp_path / "repro", kernel)


@pytest.mark.slow
def test_replay_refuses_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_accuracy_repro(tmp_path / "repro", blamed())
    assert cli.main(["replay", str(tmp_path / "repro")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "status"),
    [pytest.param(1.0, 0, id="right", marks=pytest.mark.exhaustive), pytest.param(1.01, 1, id="wrong")],
)
def test_script_prints_the_ratio(scale: float, status: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_accuracy_repro(tmp_path / "repro", blamed(scale=scale))
    finished = done(tmp_path / "repro")
    assert finished.status == status, finished
    assert (ratio_of(finished) > 1000) == bool(status)
    assert "buf'1: " in finished.stdout
    assert "(eager mode: 0.84)" in finished.stdout
    assert "float64: " in finished.stdout


SPECIAL = {
    "equal NaN": ([math.nan, 1.0], [math.nan, 1.0], 0),
    "NaN where a number belongs": ([math.nan, 1.0], [2.0, 1.0], 1),
    "a number where NaN belongs": ([2.0, 1.0], [math.nan, 1.0], 1),
    "equal infinities": ([math.inf, 1.0], [math.inf, 1.0], 0),
    "infinities of other signs": ([math.inf, 1.0], [-math.inf, 1.0], 1),
    "zeros of other signs": ([0.0, 1.0], [-0.0, 1.0], 0),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_have_a_ratio(name: str, tmp_path: Path) -> None:
    value, reference, beyond = SPECIAL[name]
    call = captured_inputs("same", [torch.tensor(value)])
    graph = Graph()
    x = graph.placeholder("x")
    expected = ExpectedResult("x", 0, torch.tensor(reference, dtype=torch.float64), torch.full((2,), 1e-7).double())
    function = function_of([], [x], [x])
    write_accuracy_repro(tmp_path / "repro", BlamedCall(call, (expected,), function))
    with pytest.raises(SystemExit) as ended:
        exec_script(tmp_path / "repro")
    assert ended.value.code == beyond


def test_integers_have_no_rounding(tmp_path: Path) -> None:
    for reference, code in ((3, 0), (4, 1)):
        graph = Graph()
        x = graph.placeholder("x")
        expected = ExpectedResult("x", 0, torch.tensor([reference]), torch.zeros(1, dtype=torch.float64))
        call = captured_inputs("same", [torch.tensor([3])])
        write_accuracy_repro(tmp_path / "repro", BlamedCall(call, (expected,), function_of([], [x], [x])))
        with pytest.raises(SystemExit) as ended:
            exec_script(tmp_path / "repro")
        assert ended.value.code == code


def exec_script(folder: Path) -> None:
    """Run a script here: a process that imports torch takes seconds."""
    path, threads = folder / "repro.py", torch.get_num_threads()
    try:
        exec(compile(path.read_text(), str(path), "exec"), {"__file__": str(path), "__name__": "__main__"})
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted", [pytest.param(False, id="right", marks=pytest.mark.exhaustive), pytest.param(True, id="planted")]
)
def test_kernel_of_the_compiler_is_compiled_and_judged(planted: bool, tmp_path: Path) -> None:
    model, x = Scatter(accumulate=False), torch.full((), 0.5)
    try:
        call = captured_kernel(model, x)
    finally:
        torch._dynamo.reset()
    exact = torch.nn.functional.gelu(model.weight.detach().double() * 0.5) * 2
    allowed = exact.abs() * 2**-22 + 2**-24
    written = call.func.plan.written[0]
    expected = ExpectedResult("buf0", written, exact * (1 + 1e-3 * planted), allowed)
    write_accuracy_repro(tmp_path / "repro", BlamedCall(call, (expected,)))
    finished = done(tmp_path / "repro")
    assert finished.status == int(planted), finished
    assert (ratio_of(finished) > 100) == planted
