"""The stage of the compiler that raised, from the types in the chain of causes and the files of the frames."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo

from hashbench.core.inductor.failures import CompilerFailure, failed_in


def raised(*names: str, text: str = "", path: str = "") -> BaseException:
    """A chain of exceptions of these types, the outermost first; the innermost was raised in a file."""
    *outer, inner = (type(name, (Exception,), {})(text) for name in names)
    try:
        exec(compile("raise inner", path or "zoo.py", "exec"), {"inner": inner})
    except Exception as error:
        chain = [*outer, error]
    for one, cause in itertools.pairwise(chain):
        one.__cause__ = cause
    return chain[0]


CHAINS: dict[str, tuple[tuple[str, ...], str, str, CompilerFailure]] = {
    "a lowering": (
        ("BackendCompilerFailed", "LoweringException", "KeyError"),
        "\n  target: aten.erf.default\n  args[0]: x",
        "",
        CompilerFailure("lowering", "aten.erf.default"),
    ),
    "no C++ compiler": (
        ("InductorError", "InvalidCxxCompiler"),
        "No working C++ compiler",
        "",
        CompilerFailure("codegen"),
    ),
    "an unsupported program": (("Unsupported",), "", "", CompilerFailure("dynamo")),
    "a pass": (
        ("BackendCompilerFailed", "AssertionError"),
        "",
        "/x/torch/_inductor/fx_passes/post_grad.py",
        CompilerFailure("post_grad_passes"),
    ),
    "a joint pass": (
        ("InductorError", "AssertionError"),
        "",
        "/x/torch/_inductor/fx_passes/joint_graph.py",
        CompilerFailure("joint_graph_passes"),
    ),
    "code generation": (
        ("InductorError", "AssertionError"),
        "",
        "/x/torch/_inductor/codegen/cpp.py",
        CompilerFailure("codegen"),
    ),
    "AOTAutograd": (
        ("BackendCompilerFailed", "RuntimeError"),
        "",
        "/x/torch/_functorch/a.py",
        CompilerFailure("aot_autograd"),
    ),
    "a backend of the user": (
        ("BackendCompilerFailed", "RuntimeError"),
        "",
        "/home/me/backend.py",
        CompilerFailure("dynamo"),
    ),
    "the program itself": (("ValueError",), "", "/x/torch/_inductor/lowering.py", CompilerFailure("runtime")),
}


@pytest.mark.parametrize("name", CHAINS)
def test_stage_and_op_of(name: str) -> None:
    names, text, path, expected = CHAINS[name]
    assert failed_in(raised(*names, text=text, path=path)) == expected


def test_a_chain_that_refers_to_itself_ends() -> None:
    error: Any = ValueError("loop")
    error.__cause__ = error
    assert failed_in(error) == CompilerFailure("runtime")


@pytest.mark.slow
def test_a_real_lowering_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    from hashbench.core.inductor.internals import without_graph_caches

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setitem(lowering.lowerings, torch.ops.aten.cosh.default, fails)
    torch._dynamo.reset()
    with without_graph_caches(), pytest.raises(Exception, match="planted") as caught:
        torch.compile(lambda x: x.cosh() + 1)(torch.ones(3))
    torch._dynamo.reset()
    assert failed_in(caught.value) == CompilerFailure("lowering", "aten.cosh.default")
