"""Records of calls: every byte that is written, tensors of every kind, and the short cuts of the hot path."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hashbench import HashDebugTrace, Trace, find_divergence
from hashbench.core.records import op_of
from hashbench.core.trace import file
from hashbench.core.trace.callbacks import TraceOptions
from hashbench.core.trace.digest import digest
from hashbench.core.trace.mode import TracingMode
from hashbench.core.trace.op_schema import OpPlan, Pattern, plan_of
from tests.core.trace.mode_helpers import Attending, Dropping, record, train, value, values, written

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


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


@pytest.fixture(scope="module")
def attention() -> Any:
    """Ops with the schemas of torch's attention on accelerators: outputs for dropout that are undefined without it."""
    library = torch.library.Library("hashbench_attention", "DEF")
    state = "Tensor philox_seed, Tensor philox_offset"
    library.define(f"forward(Tensor query, float dropout_p=0.) -> (Tensor output, {state})")
    library.define(f"backward(Tensor grad, {state}, float dropout_p) -> (Tensor, Tensor)")
    garbage = itertools.count()

    def forward(query: torch.Tensor, *_: float) -> tuple[torch.Tensor, ...]:
        return query * 2, torch.tensor(next(garbage)), torch.tensor(next(garbage))

    def backward(grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return grad * 2, grad + next(garbage)

    library.impl("forward", forward, "CPU")
    library.impl("backward", backward, "CPU")
    yield torch.ops.hashbench_attention
    library._destroy()


@pytest.mark.parametrize("hash_inputs", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("digests", ["fast", "device"])
def test_state_of_the_generator_counts_with_dropout_only(
    attention: Any, digests: str, dropout: float, hash_inputs: bool
) -> None:
    """Else every attention on a GPU is blamed for what follows it."""

    def run() -> Trace:
        with HashDebugTrace(hash_inputs=hash_inputs, digests=digests) as trace:
            output, seed, offset = attention.forward(torch.ones(3), dropout)
            trace.add_result("grad", attention.backward(output, seed, offset, dropout)[1])
        return trace.finish()

    first, second = run(), run()
    divergence = find_divergence(first, second).divergence
    assert divergence is not None
    name = "backward" if dropout == 0 else "forward"
    assert (divergence.inside or op_of(divergence.node)) == f"hashbench_attention.{name}.default"
    written = next(record for record in first.records if record.op.endswith("forward.default")).outputs
    assert [digest.value == "undefined" for digest in written] == [False, dropout == 0, dropout == 0]
    read = [ref.digest for ref in first.records[-1].inputs[:3]]
    assert [digest == "undefined" for digest in read] == [False, *[dropout == 0 and hash_inputs] * 2]
