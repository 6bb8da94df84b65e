"""Who wrote over what a call reads: by the names of buffers, on calls written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hashbench.core.inductor.graphs import BufferRead, BufferWrite, CompiledGraph, KernelCall
from hashbench.core.inductor.nodes import NodeFacts
from hashbench.extensions.compiled.names import Overwriter, OverwriterSearch
from tests.extensions.compiled.steps import show

NOTHING = torch.empty(0)
SIN = NodeFacts("aten.sin.default", "Net.sine")


def graph() -> CompiledGraph:
    made = torch.fx.Graph()
    x = made.placeholder("x")
    node = made.call_function(torch.ops.aten.sin.default, (x,))
    node.meta["nn_module_stack"] = {"": ("L['self'].sine", torch.nn.Module), "self": ("L['self'].sine", "Sine")}
    node.meta["original_aten"] = torch.ops.aten.sin.default
    made.output(node)
    return CompiledGraph("t.py", torch.fx.GraphModule({}, made), {"buf1": node})


def call(kernel: str, reads: str = "", writes: str = "") -> KernelCall:
    """``reads`` and ``writes``: ``buf0=digest@address`` each; 16 bytes lie at an address."""

    def parts(text: str) -> list[tuple[str, str, int]]:
        found = []
        for word in text.split():
            name, _, rest = word.partition("=")
            digest, _, address = rest.partition("@")
            found.append((name.removeprefix("?"), digest, int(address or 0)))
        return found

    return KernelCall(
        f"id of {kernel}",
        kernel,
        reads=tuple(BufferRead(name, digest, address, 16) for name, digest, address in parts(reads)),
        writes=tuple(BufferWrite(name, NOTHING, digest, address, 16) for name, digest, address in parts(writes)),
    )


EXP = call("exp", writes="buf0=a@100")

CASES: dict[str, tuple[Sequence[KernelCall], str]] = {
    "what was written is read": ((EXP, call("sum", "buf0=a@100")), ""),
    "another buffer took its memory": ((EXP, call("sin", "", "buf1=b@100"), call("sum", "buf0=b@100")), "sin of exp"),
    "a part of its memory": ((EXP, call("sin", "", "buf1=b@108"), call("sum", "buf0=c@100")), "sin of exp"),
    "memory beside it": ((EXP, call("sin", "", "buf1=b@116"), call("sum", "buf0=c@100")), ""),
    "memory before it": ((EXP, call("sin", "", "buf1=b@84"), call("sum", "buf0=c@100")), ""),
    "the last one that wrote there": (
        (EXP, call("sin", "", "buf1=b@100"), call("cos", "", "buf2=c@100"), call("sum", "buf0=c@100")),
        "cos of exp",
    ),
    "written again under its name": ((EXP, call("add", "", "buf0=b@100"), call("sum", "buf0=b@100")), ""),
    "overwritten after that": (
        (EXP, call("add", "", "buf0=b@100"), call("sin", "", "buf1=c@100"), call("sum", "buf0=c@100")),
        "sin of add",
    ),
    "the same content": ((EXP, call("sin", "", "buf1=a@100"), call("sum", "buf0=a@100")), ""),
    "a buffer that nobody wrote": ((call("sin", "", "buf1=b@100"), call("sum", "buf0=c@100")), ""),
    "no name": ((call("exp", "", "?=a@100"), call("sin", "", "buf1=b@100"), call("sum", "?=c@100")), ""),
    "no address": ((call("exp", "", "buf0=a"), call("sin", "", "buf1=b"), call("sum", "buf0=c")), ""),
    "the second of its reads": (
        (EXP, call("sin", "", "buf1=b@100"), call("sum", "buf1=b@100 buf0=b@100")),
        "sin of exp",
    ),
    "it writes over what it reads": ((EXP, call("sum", "buf0=a@100", "buf1=b@100")), ""),
    "overwritten after the call": ((EXP, call("sum", "buf0=a@100"), call("sin", "", "buf1=b@100")), ""),
}


def judged(*calls: KernelCall, node: str = "id of sum") -> Overwriter | None:
    search = OverwriterSearch(node)
    show(search, graph(), [], *calls)
    return search.found


@pytest.mark.parametrize("case", CASES)
def test_who_wrote_over_it(case: str) -> None:
    calls, expected = CASES[case]
    found = judged(*calls)
    assert ("" if found is None else f"{found.kernel} of {found.written_by}") == expected


def test_the_guilty_call_is_told_with_what_it_computes() -> None:
    found = judged(EXP, call("sin", "", "buf1=b@100"), call("sum", "buf0=b@100"))
    assert found is not None
    assert (found.node, found.buffer, found.facts.op) == ("id of sin", "buf0", SIN.op)


def test_another_call_is_not_asked() -> None:
    calls = EXP, call("sin", "", "buf1=b@100"), call("sum", "buf0=b@100")
    assert judged(*calls, node="id of mean") is None


def test_each_call_of_a_graph_begins_anew() -> None:
    search = OverwriterSearch("id of sum")
    for calls in ((EXP, call("sin", "", "buf1=b@100")), (call("sum", "buf0=b@100"),)):
        show(search, graph(), [], *calls)
    assert search.found is None
