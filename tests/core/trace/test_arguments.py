"""Arguments of calls: nested tensors, text, generator states, source lines."""

from __future__ import annotations

import ctypes
import re
import sys
from typing import Any

import pytest
import torch
from torch import nn

from hashbench import HashDebugTrace, find_divergence
from hashbench.core.trace.arguments import (
    argument_text,
    caller_line,
    generator_digest,
    named_arguments,
    raising_line,
    tensors_in,
)
from tests.core.trace.mode_helpers import Nested, ops, record

traced = pytest.mark.usefixtures("seeded", "each_tracer")


@traced
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda _: nn.functional.dropout(torch.ones(8)), id="dropout"),
        pytest.param(lambda _: torch.ones(8).bernoulli_(), id="bernoulli_"),
        pytest.param(lambda _: torch.randn(8), id="randn"),
        pytest.param(lambda _: torch.randperm(8), id="randperm"),
        pytest.param(lambda _: torch.multinomial(torch.ones(8), 2), id="multinomial"),
        pytest.param(lambda own: torch.rand(8, generator=own), id="a generator of its own"),
        pytest.param(lambda own: torch.ones(8).normal_(generator=own), id="in place from a generator of its own"),
    ],
)
def test_seeded_op_records_its_generators_state(draw: Any) -> None:
    def states(seed: int) -> list[str]:
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(seed)
        with HashDebugTrace() as trace:
            draw(own)
        return [r.rng for r in trace.finish().records if r.rng]

    assert states(1) == states(1) != states(2)
    assert len(states(1)) == 1


@traced
def test_source_lines_are_empty_in_autograd_threads() -> None:
    with HashDebugTrace(source_lines=True) as trace:
        Nested.apply(torch.ones(2, requires_grad=True), 70).sum().backward()
    assert ops(trace).count("clone") == 2 * 71


@traced
def test_source_lines_name_the_caller() -> None:
    with HashDebugTrace(source_lines=True) as trace:
        x = torch.rand(3, requires_grad=True)
        y = x.tanh()
        y.sum().backward()
    assert re.fullmatch(r"test_arguments\.py:\d+ test_source_lines_\w+", record(trace, "tanh").source)
    assert record(trace, "tanh_backward").source == record(trace, "tanh").source


# ------------------------------------------------------------------------------------------------ without a trace


class Opaque:
    """An object whose ``repr`` has an address."""


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([1, 0.1, True, None, 2j], "1, 0.1, True, None, 2j"),
        ([float("nan"), -0.0], "nan, -0.0"),
        ([[1, 2], (3,)], "[1, 2], [3]"),
        ([("dim", 1), ("eps", 1e-5)], "dim=1, eps=1e-05"),
        (["mean", ("mode", "mean")], "'mean', mode='mean'"),
        ([torch.float32, torch.device("cpu"), torch.strided], "torch.float32, cpu, torch.strided"),
        ([Opaque(), [Opaque()], ("own", Opaque())], "<Opaque>, [<Opaque>], own=<Opaque>"),
    ],
)
def test_argument_text(values: list[Any], text: str) -> None:
    assert argument_text(values) == text


def test_named_arguments() -> None:
    a, b, c = torch.ones(3)
    named = dict(named_arguments([a, 2, [b, 3]], {"out": c, "alpha": 2}))
    assert {name: tensor is {"0": a, "2.0": b, "out": c}[name] for name, tensor in named.items()} == {
        "0": True,
        "2.0": True,
        "out": True,
    }


@pytest.mark.parametrize(
    "wrap", [lambda x, y: [x, y], lambda x, y: ({"a": x}, [1, (y,)]), lambda x, y: {"a": [x, "y", y]}]
)
def test_tensors_in_keeps_order(wrap: Any) -> None:
    x, y = torch.ones(2)
    assert [id(tensor) for tensor in tensors_in(wrap(x, y))] == [id(x), id(y)]
    assert tensors_in(3) == []


def test_generator_digest_draws_nothing() -> None:
    own = torch.Generator().manual_seed(3)
    before = own.get_state(), torch.get_rng_state()
    first = generator_digest((torch.ones(2),), {"generator": own})
    assert (
        first == generator_digest((own,), {}) == generator_digest((), {"generator": torch.Generator().manual_seed(3)})
    )
    assert torch.equal(before[0], own.get_state())
    assert torch.equal(before[1], torch.get_rng_state())
    torch.rand(1, generator=own)
    assert generator_digest((own,), {}) != first


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_default_generator_is_hashed_without_one(device: str) -> None:
    torch.manual_seed(1)
    first = generator_digest((3,), {"device": torch.device(device)})
    assert first == generator_digest((torch.ones(2),), {}) == generator_digest((torch.default_generator,), {})
    torch.manual_seed(2)
    assert generator_digest((torch.ones(2),), {}) != first


def test_caller_line_skips_torch_and_the_library() -> None:
    lines = []

    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe()
            lines.append((caller_line(frame), caller_line(frame.f_back)))
            return x

    Probe()(torch.ones(1))
    inner, outer = lines[0]
    assert re.fullmatch(r"test_arguments\.py:\d+ forward", inner)
    assert re.fullmatch(r"test_arguments\.py:\d+ test_caller_line_\w+", outer)  # past torch.nn.Module.__call__
    assert caller_line(None) == ""


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("<stdin>", "<stdin>:2 typed"),
        ("<ipython-input-3-ab>", "<ipython-input-3-ab>:2 typed"),
        ("<string>", "test_arguments.py"),  # what a library generates has such a name
    ],
)
def test_lines_that_were_typed_are_the_users(file: str, expected: str) -> None:
    space: dict[str, Any] = {"sys": sys, "caller_line": caller_line}
    exec(compile("def typed():\n    return caller_line(sys._getframe())", file, "exec"), space)
    assert space["typed"]().startswith(expected)


def _from(file: str) -> BaseException:
    """Return an error that code of ``file`` gets from the standard library."""
    with pytest.raises(ValueError, match="Expecting") as caught:
        exec(compile("import json\n\ndef load():\n    json.loads('{')\n\nload()", file, "exec"), {})
    return caught.value


@pytest.mark.parametrize(
    ("file", "line"),
    [
        pytest.param("/mine/zoo.py", "zoo.py:4 load", id="the innermost line of the model"),
        pytest.param(torch.nn.__file__, "test_arguments.py", id="of torch its caller"),
    ],
)
def test_the_line_that_raised_is_the_models(file: str, line: str) -> None:
    assert raising_line(_from(file)).startswith(line)


def test_an_error_that_nobody_raised_has_no_line() -> None:
    assert raising_line(ValueError("none")) == ""


def _adopted(value: int, *, shared: bool) -> Any:
    storage = torch.UntypedStorage._new_shared(16) if shared else torch.UntypedStorage(16)
    ctypes.memset(storage.data_ptr(), value, 16)  # another process, or nobody
    with HashDebugTrace() as trace:
        out = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (16,), (1,)) + 1
    trace.add_result("out", out)
    return trace.finish()


@pytest.mark.parametrize(("shared", "origin"), [(True, "outside"), (False, "kernel")])
def test_memory_of_other_processes_is_no_uninitialised_memory(shared: bool, origin: str) -> None:
    found = find_divergence(*(_adopted(value, shared=shared) for value in (1, 2)))
    assert found.divergence is not None
    assert (found.divergence.origin, found.divergence.kernel) == (origin, "aten.set_.source_Storage_storage_offset")


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - 2


def _hook(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 4


def _differentiated() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(_hook)
    _Own.apply(y).sum().backward()


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_a_backward_of_ones_own_has_its_own_line(tracer: str) -> None:
    with HashDebugTrace(source_lines=True, tracer=tracer) as trace:
        _differentiated()
    lines = {
        record.op: record.source.rpartition(" ")[2] for record in trace.finish().records if record.phase == "backward"
    }
    assert {op: lines[op] for op in ("aten.sub.Tensor", "aten.div.Tensor", "aten.cos.default")} == {
        "aten.sub.Tensor": "backward",
        "aten.div.Tensor": "_hook",
        "aten.cos.default": "_differentiated",  # that of its forward
    }
