"""The rules of tracing (docstring of ``hashbench.trace``), one by one, on real torch ops."""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from hashbench import HashDebugTrace
from hashbench.divergence import find
from hashbench.records import Trace
from hashbench.trace import file
from hashbench.trace.callbacks import TraceOptions
from hashbench.trace.digest import digest
from hashbench.trace.mode import TracingMode
from hashbench.trace.op_schema import OpPlan, Pattern, plan_of
from tests.trace.mode_helpers import iterations, record, text_of, trained, value, values

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


def written(trace: HashDebugTrace) -> list[str]:
    """The digests of all that the ops of a trace wrote."""
    return [value for record in trace.finish().records for value in values(record)]


# ------------------------------------------------------------------------------- 1. every byte that is written


def test_an_op_that_returns_nothing_records_every_tensor_of_its_list() -> None:
    x, y = torch.rand(3), torch.rand(5)
    with HashDebugTrace() as trace:
        torch._foreach_add_([x, y], 1.0)
    assert values(record(trace, "_foreach_add_")) == [value(x), value(y)]


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_an_optimizer_step_records_parameters_and_state(options: dict[str, bool]) -> None:
    weight = nn.Parameter(torch.rand(4))
    weight.grad = torch.rand(4)
    optimizer = torch.optim.Adam([weight], **options)
    with HashDebugTrace() as trace:
        optimizer.step()
    left = [weight, *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq", "step"))]
    assert {value(tensor) for tensor in left} <= {*written(trace)}
    assert {r.phase for r in trace.finish().records} == {"optimizer"}


@pytest.mark.parametrize("track", [True, False], ids=["training", "evaluation"])
def test_batch_norm_records_updated_statistics(track: bool) -> None:
    model = nn.BatchNorm1d(3).train(track)
    with HashDebugTrace() as trace:
        out = model(torch.rand(4, 3))
    left = written(trace)
    assert value(out) in left
    assert (value(model.running_mean) in left) == (value(model.running_var) in left) == track


def test_an_op_that_returns_a_tuple_records_every_output() -> None:
    x = torch.rand(4, 5)
    with HashDebugTrace() as trace:
        first, second = torch.sort(x)
    assert values(record(trace, "sort")) == [value(first), value(second)]


VIEWS = {
    "split": lambda x: x.split(2),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(),
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "view": lambda x: x.view(-1),
    "detach": lambda x: x.detach(),
    "expand": lambda x: x.expand(2, 4, 4),
    "diagonal": lambda x: x.diagonal(),
    "complex views": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 2, 2))),
}


@pytest.mark.parametrize("take", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("computed", [True, False], ids=["of a computed tensor", "of a leaf"])
def test_a_view_writes_nothing(take: Any, computed: bool) -> None:
    x = torch.rand(4, 4)
    with HashDebugTrace() as trace:
        take(x * 2 if computed else x)
    views = trace.finish().records[int(computed) :]
    assert views
    assert all(view.outputs == () for view in views)


@pytest.mark.parametrize("size", [3, 0], ids=["of the right size", "that grows"])
def test_an_out_variant_records_what_it_wrote_into(size: int) -> None:
    x, out = torch.rand(3), torch.zeros(size)
    with HashDebugTrace() as trace:
        torch.add(x, x, out=out)
        out.mul(1)
    (ref,) = [ref for ref in record(trace, "add").inputs if ref.argument == "out"]
    assert ref.written
    assert values(record(trace, "add")) == [value(out)]
    assert record(trace, "mul").inputs[0].source == record(trace, "add").id


@pytest.mark.parametrize(
    "allocate",
    [
        pytest.param(lambda: torch.empty(3), id="empty"),
        pytest.param(lambda: torch.empty_like(torch.zeros(3)), id="empty like"),
        pytest.param(lambda: torch.empty_strided((3, 2), (2, 1)), id="empty strided"),
        pytest.param(lambda: torch.zeros(2).new_empty(3), id="new empty"),
        pytest.param(lambda: torch.zeros(2).resize_(300), id="growing by resize"),
    ],
)
def test_allocations_are_blank_resize_in_storage_is_not(allocate: Any) -> None:
    with HashDebugTrace() as trace:
        torch.zeros(4).resize_(2)
        allocate()
    last = trace.finish().records[-1]
    assert (record(trace, "resize_").blank, last.blank, values(last)) == (False, True, [""])


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda x: x.sum().item(), "3.0"),
        (lambda x: bool(x.sum() > 1), "True"),
        (lambda x: int(x.long().sum()), "3"),
        (lambda x: torch.equal(x, x), "True"),
    ],
    ids=["item", "bool", "int", "equal"],
)
def test_a_python_scalar_that_an_op_returns_is_recorded(read: Any, expected: str) -> None:
    with HashDebugTrace() as trace:
        read(torch.ones(3))
    assert trace.finish().records[-1].scalar == expected


# ----------------------------------------------------------------------------------------- 2. every leaf once


def test_every_kind_of_leaf_is_hashed_once_and_named() -> None:
    model = nn.BatchNorm1d(3).eval()
    x, other = torch.rand(4, 3), torch.rand(4, 3)
    with HashDebugTrace(model=model, inputs=(x,)) as trace:
        model(x) + other + x + other
    found = {leaf.id: leaf.digest.value for leaf in trace.finish().leaves}
    assert found == {
        "input/0": value(x),
        "parameter/BatchNorm1d.weight": value(model.weight),
        "parameter/BatchNorm1d.bias": value(model.bias),
        "buffer/BatchNorm1d.running_mean": value(model.running_mean),
        "buffer/BatchNorm1d.running_var": value(model.running_var),
        "other/#0": value(other),
    }


@pytest.mark.parametrize("registered", [True, False])
def test_unregistered_parameters_are_named_tied_once(registered: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with HashDebugTrace(model=model if registered else None) as trace:
        model(torch.ones(1, 3))
    assert [leaf.id for leaf in trace.finish().leaves if leaf.kind == "parameter"] == ["parameter/Sequential.0.weight"]


def test_parameter_with_two_names_has_the_first() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("none", None)
            self.first = nn.Parameter(torch.ones(2))
            self.second = self.first
            self.register_buffer("state", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.second + self.state

    model, x = Twice(), torch.ones(2)
    with HashDebugTrace() as trace:
        model(x)
    names = [leaf.id for leaf in trace.finish().leaves if leaf.kind != "other"]
    assert names == ["parameter/Twice.first", "buffer/Twice.state"]


# ---------------------------------------------------------------------------------------------- 3. the graph


# ----------------------------------------------------------------------------- 4. phases, modules, forward ops


class Twice(nn.Module):
    """Calls one module twice and a shared one from two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.again = self.inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.inner(x)) + 1


def test_module_paths_follow_nesting_repetition_and_sharing() -> None:
    with HashDebugTrace() as trace:
        Twice()(torch.ones(1, 3))
    found = [(r.op.split(".")[1], r.module) for r in trace.finish().records if r.outputs]
    once = [("addmm", "Twice.inner.0"), ("relu", "Twice.inner.1")]
    assert found[-5:] == [*once, *once, ("add", "Twice")]


class Catches(nn.Module):
    """Catches the exception of a module inside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        except RuntimeError:
            return x + 1


def test_path_is_right_after_a_caught_exception() -> None:
    with HashDebugTrace() as trace:
        Catches(Catches(nn.Sequential(nn.Linear(7, 7))))(torch.ones(1, 3)).mul(2)
    assert (record(trace, "add").module, record(trace, "mul").module) == ("Catches.inner", "")


# ----------------------------------------------------------------------------------------------- 5. seeded ops


# -------------------------------------------------------------------------------- inputs hashed, source lines


# -------------------------------------------------------------------------------- 7. nothing is changed by it


class Dropping(nn.Sequential):
    """A small network with a dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.GELU(), nn.Linear(8, 2))


class Attending(nn.Module):
    """A small transformer layer over tokens, with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed((x * 9).long().abs() % 10))


class Convolving(nn.Module):
    """Convolution in channels-last, pooling and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.lstm = nn.LSTM(8, 4, batch_first=True, dropout=0.5, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x[None, None].contiguous(memory_format=torch.channels_last))
        return self.lstm(nn.functional.adaptive_avg_pool2d(y, (4, 8)).flatten(0, 1))[0]


def train(kind: type[nn.Module], steps: int = 2, **options: Any) -> list[torch.Tensor]:
    """What two steps of training leave, from a fixed seed."""
    torch.manual_seed(3)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(torch.rand(5, 6))
        out.square().mean().backward()
        optimizer.step()
    state = [entry for parameter in optimizer.state.values() for entry in parameter.values()]
    return [out.detach(), *model.parameters(), *model.buffers(), *state, torch.get_rng_state()]


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True, "source_lines": True}], ids=["plain", "all noted"])
@pytest.mark.parametrize("kind", [Dropping, Attending, Convolving])
def test_trace_changes_no_result_or_generator(kind: type[nn.Module], options: dict[str, bool]) -> None:
    random.seed(1), np.random.seed(1)
    expected = train(kind)
    with HashDebugTrace(**options) as trace:
        found = train(kind)
    assert [value(tensor) for tensor in found] == [value(tensor) for tensor in expected]
    assert (random.random(), np.random.rand()) == (random.Random(1).random(), np.random.RandomState(1).rand())
    assert len(trace.finish().records) > 50


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True, "verbose": True}], ids=["plain", "all noted"])
def test_no_tensor_is_kept_alive(options: dict[str, bool], capsys: pytest.CaptureFixture[str]) -> None:
    dead: list[weakref.ref[Any]] = []
    with HashDebugTrace(**options) as trace:
        leaf = torch.rand(10)
        for _ in range(3):
            x = (leaf[:5] * 2).requires_grad_()
            y = x.tanh().sum()
            y.backward()
            torch.empty(4).resize_(100)
            dead += [weakref.ref(t) for t in (x, y, x.grad, leaf[2:], x.untyped_storage())]
            del x, y
        gc.collect()
        assert [reference() for reference in dead] == [None] * len(dead)
    assert trace.finish().records
    capsys.readouterr()


def hooks_and_modes() -> tuple[Any, ...]:
    """What torch has installed globally."""
    hooks = torch.nn.modules.module
    return (
        dict(hooks._global_forward_hooks),
        dict(hooks._global_forward_pre_hooks),
        dict(hooks._global_forward_hooks_always_called),
        dict(optimizer_module._global_optimizer_pre_hooks),
        dict(optimizer_module._global_optimizer_post_hooks),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        torch.overrides._get_current_function_mode_stack(),
        nn.Module.__call__,
        nn.Module.__dict__.get("__setattr__"),
        torch.Tensor.__dict__.get("__torch_dispatch__"),
    )


@pytest.mark.parametrize("fails", [False, True], ids=["normally", "by an exception"])
def test_nothing_stays_installed_when_a_trace_is_left(fails: bool) -> None:
    before, trace = hooks_and_modes(), HashDebugTrace()
    try:
        with trace:
            assert hooks_and_modes() != before
            train(Dropping, 1)
            if fails:
                nn.Linear(7, 7)(torch.ones(1, 3))
    except RuntimeError:
        assert fails
    assert hooks_and_modes() == before
    assert trace.failed_op == ("aten.addmm.default" if fails else "")
    assert not trace.is_active()
    assert len(trace.finish().records) > 10


# -------------------------------------------------------------------------------------- tensors of other kinds


class Wrapped(torch.Tensor):
    """A plain subclass."""


COMPUTED = {
    "sparse": lambda: torch.eye(4).to_sparse() @ torch.rand(4, 4),
    "sparse csr": lambda: torch.eye(4).to_sparse_csr() @ torch.rand(4, 4),
    "nested": lambda: (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2).to_padded_tensor(0.0),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged) * 2,
    "jagged, trained": lambda: trained_jagged(),
    "jagged attention": lambda: torch.nn.functional.scaled_dot_product_attention(
        *[jagged((2, 2), (3, 2))] * 3
    ).values(),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8).dequantize(),
    "by channel": lambda: torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
    "conjugate": lambda: torch.rand(3, 3, dtype=torch.cfloat).conj() @ torch.ones(3, 3).cfloat(),
    "negative bit": lambda: torch.rand(3, dtype=torch.complex64).conj().imag * 2,
    "float8": lambda: torch.rand(4).to(torch.float8_e4m3fn).float() * 2,
    "zero size": lambda: torch.rand(0, 3) * 2,
    "meta": lambda: torch.rand(3, device="meta") * 2,
    "expanded": lambda: torch.rand(1).expand(5) * 2,
    "channels last": lambda: torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last) * 2,
    "subclass": lambda: torch.rand(3).as_subclass(Wrapped) * 2,
    "mkldnn": lambda: torch.rand(4, 4).to_mkldnn().to_dense() * 2,
    "embedding bag": lambda: nn.functional.embedding_bag(torch.tensor([[1, 2]]), torch.rand(4, 2)),
    "vmap": lambda: torch.func.vmap(torch.sin)(torch.rand(3)),
    "functional gradient": lambda: torch.func.grad(lambda x: x.sin().sum())(torch.rand(3)),
    "resize": lambda: torch._C._nn._upsample_bilinear2d_aa(torch.rand(1, 1, 4, 4), [2, 2], False, None),
    "stft": lambda: torch.stft(torch.rand(64), 16, return_complex=True, window=torch.ones(16)),
    "higher-order op": lambda: torch.ops.higher_order.cond(torch.ones(1).sum() > 0, torch.sin, torch.cos, (X,)),
}
X = torch.rand(3)


def jagged(*shapes: tuple[int, ...], requires_grad: bool = False) -> torch.Tensor:
    """A batch of items of these shapes, each with a last dimension of 8."""
    items = [torch.rand(*shape, 8) for shape in shapes]
    made = torch.nested.nested_tensor(items, layout=torch.jagged, requires_grad=requires_grad)
    return made.transpose(1, 2) if made.dim() > 3 else made


def trained_jagged() -> torch.Tensor:
    """The gradient of a jagged batch, whose backward calls an op that returns ``None`` in place of its one tensor."""
    batch = jagged((2,), (3,), requires_grad=True)
    torch.nn.functional.linear(batch.sin(), torch.ones(5, 8)).values().sum().backward()
    assert batch.grad is not None
    return batch.grad


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_kind_traces_reproducibly(compute: Any, hash_inputs: bool) -> None:
    torch.manual_seed(5)
    expected = compute()
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        with HashDebugTrace(hash_inputs=hash_inputs) as trace:
            found = compute()
        trace.add_result("output", found)
        assert digest(found) == digest(expected)
        assert trace.finish().results[0].source in [record.id for record in trace.finish().records]
        texts.append(file.dumps(trace.finish()))
        assert file.loads(texts[-1]) == trace.finish()
    assert texts[0] == texts[1]


NONE_OPS = {
    "one": ("(Tensor x) -> Tensor", lambda _: None, 0),
    "several": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (None, x.clone()), 1),
    "several, no None": ("(Tensor x) -> (Tensor, Tensor)", lambda x: (x.sin(), x.clone()), 2),
    "view": ("(Tensor(a) x) -> Tensor(a)", lambda _: None, 0),
    "view, no None": ("(Tensor(a) x) -> Tensor(a)", lambda x: x[1:], 0),
    "optional": ("(Tensor x) -> Tensor?", lambda _: None, 0),
    "list": ("(Tensor x) -> Tensor?[]", lambda x: [None, x.clone()], 1),
}
"""Schemas and kernels of ops that return ``None`` among their outputs, and of twins that do not, and how many tensors
each writes."""


@pytest.mark.parametrize("name", NONE_OPS)
@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
def test_an_op_may_return_none_in_place_of_any_tensor(name: str, hash_inputs: bool) -> None:
    schema, kernel, written = NONE_OPS[name]
    library = torch.library.Library("returns_none", "FRAGMENT")
    try:
        library.define("op" + schema)
        library.impl("op", kernel, "CPU")
        expected = torch.ops.returns_none.op(X)
        with HashDebugTrace(hash_inputs=hash_inputs) as trace:
            found = torch.ops.returns_none.op(X)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        made = [output for record in trace.finish().records for output in record.outputs]
        assert len(set(made)) == written  # by the op, or with the native tracer by an op that it calls
    finally:
        library._destroy()


def test_tensor_of_an_untraced_thread_is_a_leaf() -> None:
    made: list[torch.Tensor] = []
    with HashDebugTrace() as trace:
        thread = threading.Thread(target=lambda: made.append(torch.ones(3) * 2))
        thread.start()
        thread.join()
        made[0] + 1
    seen = "forward//aten.mul.Tensor#t0.0"
    assert record(trace, "add").inputs[0].source == (seen if trace.tracer == "native" else "other/#0")


# ------------------------------------------------------------------------------------------------ 8. the text


def test_equal_runs_give_equal_text() -> None:
    model, x = Dropping().eval(), torch.ones(3, 6)
    assert text_of(model, x) == text_of(model, x) != text_of(model, x + 1)


# ------------------------------------------------------------------------------- the interface of the ancestor


def careful_plan(func: Any) -> OpPlan:
    """A plan without short cuts: every argument is looked at, and the schema alone says what was written."""
    return dataclasses.replace(plan_of(func), leading=None, pattern=Pattern.GENERAL)


def _optional_arguments() -> torch.Tensor:
    x, y = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3)
    z = torch.clamp(x, None, y) + torch.clamp(x, y * 0, None) + torch.where(y > 0.5, x, 0.0)
    z = nn.functional.layer_norm(z, (3,)) + torch.addmm(x[0], y, x, beta=2) + x.lerp(y, 0.5)
    z = torch.stack([z, y, x.t()]).sum(0) + torch.einsum("ij,jk->ik", x, y[:, :3]) + x[:, y.argmax(1)]
    z.sum().backward()
    return z


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda: train(Dropping, fused=True), id="fused optimizer"),
        pytest.param(lambda: train(Attending, foreach=True), id="foreach optimizer"),
        pytest.param(lambda: nn.Conv2d(1, 2, 3)(torch.rand(1, 1, 5, 5)).relu().sum().backward(), id="convolution"),
        pytest.param(_optional_arguments, id="optional arguments"),
    ],
)
def test_the_short_cuts_of_the_hot_path_record_the_same(body: Any) -> None:
    traces = []
    for mode in (TracingMode(TraceOptions()), TracingMode(TraceOptions(), careful_plan)):
        torch.manual_seed(0)
        trace = HashDebugTrace()
        trace._tracer = mode
        with trace:
            body()
        patterns = {plan.pattern for plan in mode._calls.plans.values()}
        traces.append(file.dumps(trace.finish()).splitlines())
    assert traces[0] == traces[1]
    assert patterns == {Pattern.GENERAL}


def test_tensors_without_memory_are_recorded() -> None:
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)
    x = torch.randn(3, requires_grad=True)

    with HashDebugTrace() as trace:
        torch.ops.aten._efficientzerotensor([3])  # has a shape and no address
        x.sgn().sum().backward()  # its derivative makes one, too
        freed.view(2, 2)

    records = trace.finish().records
    assert records[0].op == "aten._efficientzerotensor.default"
    assert records[0].outputs == (digest(torch.zeros(3)),)
    assert records[-1].op == "aten.view.default"


# ---------------------------------------------------------------------------------------------------- iterations


def test_iterations_are_counted_by_the_optimizers_steps() -> None:
    trace = trained(HashDebugTrace(), 50)
    assert iterations(trace, "aten.addmm.default") == [None, *range(1, 50)]
    updates = [record for record in trace.records if record.phase == "optimizer"]
    assert [record.iteration for record in updates[::2]] == [None, *range(1, 50)]
    assert trace.records[-1].id == "forward.50//aten.ones.default#0"
    assert file.loads(file.dumps(trace)) == trace


def test_alternating_optimizers_count_once() -> None:
    trace = trained(HashDebugTrace(), 3, optimizers=2)
    assert trace.records[-1].iteration == 3


def test_hooks_of_the_optimizers_are_gone_after_the_trace() -> None:
    before = len(optimizer_module._global_optimizer_post_hooks)
    with HashDebugTrace():
        assert len(optimizer_module._global_optimizer_post_hooks) == before + 1
    assert len(optimizer_module._global_optimizer_post_hooks) == before


def noisy(steps: int, at: int, seed: int, *, train: bool) -> Trace:
    """A loop in which one step draws other numbers."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with HashDebugTrace() as trace:
        for number in range(steps):
            if number == at:
                torch.manual_seed(seed)
            loss = (weight * torch.rand(2)).sum()
            if train:
                loss.backward()
                optimizer.step()
        trace.add_result("loss", loss)
    return trace.finish()


@pytest.mark.parametrize(("at", "train", "expected"), [(0, True, 0), (2, True, 2), (2, False, None)])
def test_verdict_names_the_counted_iteration(at: int, train: bool, expected: int | None) -> None:
    verdict = find(*(noisy(3, at, seed, train=train) for seed in (1, 2)))
    assert verdict.divergence is not None
    assert verdict.divergence.iteration == expected
    shown = [line for line in str(verdict).splitlines() if line.startswith("phase:")]
    assert shown == [f"phase:            forward{'' if expected is None else f', iteration {expected}'}"]


class _OwnParameter(nn.Parameter):
    pass


class _OwnTensor(torch.Tensor):
    pass


def _marked() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2),
        lambda: nn.Parameter(torch.ones(2)),
        lambda: _OwnParameter(torch.ones(2)),
        lambda: torch.ones(2).as_subclass(_OwnTensor),
        lambda: nn.Parameter(torch.ones(2).as_subclass(_OwnTensor)),
        _marked,
    ],
    ids=[
        "a tensor",
        "a parameter",
        "of a class of its own",
        "another class",
        "a parameter of it",
        "a tensor marked so",
    ],
)
def test_leaf_kind_follows_is_parameter(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    with HashDebugTrace() as trace, torch.no_grad():
        tensor * 2
    (leaf,) = trace.finish().leaves
    assert leaf.id.partition("/")[0] == ("parameter" if isinstance(tensor, nn.Parameter) else "other")


@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
@pytest.mark.parametrize("what", ["input", "other"])
@pytest.mark.parametrize("filled", [False, True], ids=["read", "filled"])
def test_stride_only_difference_is_reported(hash_inputs: bool, what: str, filled: bool) -> None:
    def run(*, transposed: bool) -> Trace:
        x = torch.arange(12.0).reshape(3, 4)
        given = torch.zeros(4, 3).t() if transposed else torch.zeros(3, 4)
        with HashDebugTrace(inputs=given if what == "input" else None, hash_inputs=hash_inputs) as trace:
            trace.add_result("it", given.copy_(x.sin()) if filled else given + 1)
        return trace.finish()

    assert find(run(transposed=True), run(transposed=True)).equal
    divergence = find(run(transposed=False), run(transposed=True)).divergence
    assert divergence is not None
    assert divergence.origin == ("input" if what == "input" else "outside")
    assert "has other strides" in divergence.detail
    assert (divergence.first[-13:], divergence.second[-13:]) == ("stride [4, 1]", "stride [1, 3]")


@pytest.mark.parametrize(
    ("factor", "state", "expected"),
    [
        pytest.param(1.0, 1.0, None, id="equal"),
        pytest.param(2.0, 1.0, ("outside", "aten.mul.Tensor"), id="another factor"),
        pytest.param(1.0, 2.0, ("sequence", "aten.copy_.default"), id="another state"),
    ],
)
@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
def test_overwritten_initialization_introduces_nothing(
    factor: float, state: float, expected: tuple[str, str] | None, hash_inputs: bool
) -> None:
    torch.manual_seed(0)
    kept = nn.Linear(3, 2)
    loaded = {name: value * state for name, value in kept.state_dict().items()}

    def run(*, rebuilt: bool, factor: float) -> Trace:
        with HashDebugTrace(hash_inputs=hash_inputs) as trace:
            model = kept
            if rebuilt:
                model = nn.Linear(3, 2)
                model.load_state_dict(loaded)
            trace.add_result("it", nn.functional.linear(torch.ones(4, 3) * factor, model.weight, model.bias))
        return trace.finish()

    divergence = find(run(rebuilt=False, factor=1.0), run(rebuilt=True, factor=factor)).divergence
    assert expected == (divergence and (divergence.origin, divergence.kernel))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("by_name", [False, True], ids=["position", "keyword"])
@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
def test_a_closure_has_the_phases_of_what_it_runs(make: Any, by_name: bool, hash_inputs: bool) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = make(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        return model.weight

    expected = run()
    with HashDebugTrace(hash_inputs=hash_inputs) as trace:
        found = run()
    assert torch.equal(found, expected)
    phases: dict[str, set[str]] = {}
    for made in trace.finish().records:
        phases.setdefault(made.op, set()).add(made.phase)
        if made.op == "aten.addmm.default":
            assert made.module == "Linear"
    assert phases["aten.addmm.default"] == phases["aten.mean.default"] == {"forward"}
    assert phases["aten.mm.default"] == {"backward"}
    assert "optimizer" in set().union(*phases.values())
    updates = [
        phases[op] for op in phases if op.startswith(("aten._foreach_add", "aten.add_.", "aten._foreach_addcdiv"))
    ]
    assert {"optimizer"} in updates or {"optimizer", "backward"} in updates


def test_raising_closure_restores_the_phase() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def failing() -> float:
        weight.detach().sin()
        raise ValueError("closure")

    with HashDebugTrace() as trace:
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(failing)
        weight.grad = torch.ones(2)
        optimizer.step()
        weight.detach().cos()
    phases = {made.op: made.phase for made in trace.finish().records}
    assert phases["aten.sin.default"] == phases["aten.cos.default"] == "forward"
    assert "optimizer" in phases.values()
