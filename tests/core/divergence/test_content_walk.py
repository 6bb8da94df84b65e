"""The first op whose data agree and whose result does not is where two runs part: named on both sides."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hashbench.core.divergence.content import Kind, Parting
from hashbench.core.divergence.content_align import align_contents
from hashbench.core.divergence.content_walk import find_partings
from tests.core.divergence.content_graphs import Array, Run


def drawn(seed: int, *shape: int) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape))


def partings(a: tuple[Run, str], b: tuple[Run, str]) -> tuple[Parting, ...]:
    """Compare the results of two runs."""
    one, other = a[0].graph(output=a[1]), b[0].graph(output=b[1])
    return find_partings(one, other, align_contents(one, other))


def ops(run: tuple[Run, str], nodes: tuple[str, ...]) -> list[str]:
    return [run[0].nodes[node].op for node in nodes]


def start() -> tuple[Run, str]:
    run = Run()
    return run, run.leaf("x", drawn(0, 5, 4))


def mlp(scale: float = 1.0) -> tuple[Run, str]:
    run, x = start()
    h = run.op("mm", np.matmul, x, run.weight("w", drawn(1, 4, 6)))
    g = run.op("tanh", lambda h: np.tanh(scale * h), h)
    return run, run.op("mm", np.matmul, g, run.weight("v", drawn(2, 6, 3)))


def test_runs_that_agree_do_not_part() -> None:
    assert partings(mlp(), mlp()) == ()


def test_a_changed_op_is_named_on_both_sides() -> None:
    (parting,) = partings(mlp(), mlp(1.001))
    assert parting == Parting(("r2:0",), ("r2:0",), (("r1:0", "r1:0"),), results=("output",))


def test_results_that_hold_zeros_agree() -> None:
    """They are equal by chance, but they are what is compared."""
    runs = []
    for op in ("mul", "sub"):
        run, x = start()
        runs.append((run, run.op(op, lambda x: 0 * x, x)))
    assert partings(*runs) == ()


def test_a_constant_that_differs_is_named_beside_the_op() -> None:
    """And of those it is made of the first that has no partner."""
    runs = []
    for power in (2.0, 2.1):
        run, x = start()
        base = run.constant("arange", np.arange(1.0, 5.0))
        theta = run.op("pow", lambda v, p=power: v**p, base, scalars=str(power))
        runs.append((run, run.op("mul", np.multiply, x, run.op("cos", np.cos, theta))))
    (parting,) = partings(*runs)
    assert parting == Parting(("r4:0",), ("r4:0",), (("x", "x"),), (("r2:0",), ("r2:0",)), ("output",))


def test_a_weight_that_differs_is_named_beside_the_op() -> None:
    runs = []
    for stale in (0.0, 1e-3):
        run, x = start()
        runs.append((run, run.op("mm", np.matmul, x, run.weight("w", drawn(1, 4, 4) + stale))))
    (parting,) = partings(*runs)
    assert parting.constants == (("w",), ("w",))
    assert ops(runs[1], parting.b) == ["mm"]


def test_a_mask_that_data_make_is_beside_the_op() -> None:
    """Arithmetic on integers leads nowhere else: the op that reads it and floating point data is named."""
    runs = []
    for offset in (0, 1):
        run, x = start()
        positions = run.leaf("positions", np.arange(5.0))
        mask = run.op("le", lambda p, o=offset: (p[:, None] <= p[:4] + o) * 1.0, positions)
        runs.append((run, run.op("add", lambda x, m: x + m * 7, x, mask)))
    (parting,) = partings(*runs)
    assert ops(runs[1], parting.b) == ["add"]
    assert parting.constants == (("r1:0",), ("r1:0",))


def test_one_fused_op_is_joined_with_the_formula() -> None:
    """Up to the op that both call on the same weight."""
    a, x = start()
    w = a.weight("w", drawn(1, 4, 4))
    first = a, a.op("mm", np.matmul, a.op("norm", lambda x: x / (1 + x * x), x), w)
    b, y = start()
    square = b.op("mul", lambda y: y * y, y)
    more = b.op("add", lambda s: 1.001 + s, square)
    second = b, b.op("mm", np.matmul, b.op("div", np.divide, y, more), b.weight("w", drawn(1, 4, 4)))
    (parting,) = partings(first, second)
    assert ops(first, parting.a) == ["norm"]
    assert ops(second, parting.b) == ["mul", "add", "div"]
    (back,) = partings(second, first)
    assert ops(second, back.a) == ["mul", "add", "div"]
    assert ops(first, back.b) == ["norm"]


def test_an_op_that_one_side_leaves_out_is_named_and_what_reads_its_input_instead() -> None:
    a, x = start()
    h = a.leaf("h", drawn(1, 5, 4))
    first = a, a.op("exp", np.exp, a.op("add", np.add, x, h))
    b, _ = start()
    second = b, b.op("exp", np.exp, b.leaf("h", drawn(1, 5, 4)))
    (parting,) = partings(first, second)
    assert (ops(first, parting.a), ops(second, parting.b)) == (["add"], ["exp"])


def test_exchanged_halves_are_named_at_the_op_that_reads_the_wrong_one() -> None:
    runs = []
    for gate in (0, 1):
        run, x = start()
        halves = run.outputs("split", lambda x: (x[:, :2], x[:, 2:]), x)
        activated = run.op("silu", lambda g: g / (1 + np.exp(-g)), halves[gate])
        runs.append((run, run.op("mul", np.multiply, activated, halves[1 - gate])))
    (parting,) = partings(*runs)
    assert (ops(runs[0], parting.a), ops(runs[1], parting.b)) == (["silu"], ["silu"])


def test_chosen_parts_of_one_tensor_are_named_where_they_are_chosen() -> None:
    """That a matrix product reads the wrong token is no fault of the product."""
    runs = []
    for token in (4, 3):
        run, x = start()
        last = run.op("select", lambda x, t=token: x[t : t + 1], x, copies=True, scalars=str(token))
        runs.append((run, run.op("mm", np.matmul, last, run.weight("w", drawn(1, 4, 4)))))
    (parting,) = partings(*runs)
    assert (ops(runs[0], parting.a), ops(runs[1], parting.b)) == (["select"], ["select"])


def test_all_independent_partings_are_listed_and_that_of_most_results_leads() -> None:
    runs = []
    for wrong in (0.0, 1e-3):
        run, x = start()
        late = run.op("sin", lambda v, e=wrong: np.sin(v + e), run.leaf("y", drawn(3, 5, 4)))
        early = run.op("exp", lambda v, e=wrong: np.exp(v + e), x)
        runs.append(run.graph(one=run.op("add", np.add, early, late), two=run.op("neg", np.negative, early)))
    found = find_partings(*runs, align_contents(*runs))
    assert [(parting.b, parting.results) for parting in found] == [
        (("r2:0",), ("one", "two")),
        (("r1:0",), ("one",)),
    ]


def test_ops_that_read_one_constant_part_once() -> None:
    """Both halves of queries and keys read the same wrong angles."""
    runs = []
    for angle in (0.5, 0.6):
        run, x = start()
        cos = run.constant("cos", np.cos(angle * np.arange(4.0)))
        rotated = [run.op("mul", np.multiply, read, cos) for read in (x, run.leaf("k", drawn(4, 5, 4)))]
        runs.append((run, run.op("add", np.add, *rotated)))
    (parting,) = partings(*runs)
    assert parting.b == ("r2:0",)


def test_a_draw_that_differs_is_where_runs_part() -> None:
    runs = []
    for seed in (1, 2):
        run, x = start()
        mask = run.draw("bernoulli", drawn(seed, 5, 4))
        runs.append((run, run.op("mul", np.multiply, x, mask)))
    (parting,) = partings(*runs)
    assert (parting.a, parting.b) == (("r1:0",), ("r1:0",))
    assert runs[1][0].nodes[parting.b[0]].kind is Kind.RANDOM


def test_a_result_that_is_another_tensor_of_the_other_run_is_a_parting() -> None:
    """The second run leaves out the end."""
    (a, last), (b, end) = mlp(), mlp()
    del b.nodes[end]
    assert partings((a, last), (b, "r2:0")) == (Parting((last,), (), (), results=("output",)),)


def test_exchanged_results_are_a_parting() -> None:
    (a, last), (b, _) = mlp(), mlp()
    one, other = a.graph(one=last, two="r2:0"), b.graph(one="r2:0", two=last)
    found = find_partings(one, other, align_contents(one, other))
    assert [(parting.a, parting.b) for parting in found] == [((last,), ("r2:0",)), (("r2:0",), (last,))]


def test_gradients_agree_if_the_other_run_holds_them_anywhere() -> None:
    (a, last), (b, _) = mlp(), mlp()
    one, other = a.graph(**{"gradient of a": last}), b.graph(**{"gradient of b": last})
    assert find_partings(one, other, align_contents(one, other)) == ()


def test_what_nothing_explains_is_said_not_to_be_known() -> None:
    """The result is a part of what both hold: no op computes anything else."""
    runs = []
    for part in (slice(0, 2), slice(0, 3)):
        run, x = start()
        runs.append((run, run.op("slice", lambda x, p=part: x[p], x, copies=True)))
    assert partings(*runs) == (Parting((), (), (), results=("output",)),)


FUNCTIONS = (np.tanh, np.sin, np.exp, np.abs, np.cos)


@given(
    st.lists(st.tuples(st.sampled_from(FUNCTIONS), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=20),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_in_any_graph_the_planted_op_is_named(steps: list[tuple[object, int, int]], data: st.DataObject) -> None:
    planted = data.draw(st.integers(0, len(steps) - 1))
    runs = []
    for wrong in (False, True):
        run, x = start()
        made = [x]
        for index, (function, one, two) in enumerate(steps):
            reads = made[one % len(made)], made[two % len(made)]
            factor = 1 + 0.3 * index + (1e-4 if wrong and index == planted else 0)
            made.append(run.op("f", lambda u, v, f=function, c=factor: f(c * u) / (2 + f(v) ** 2), *reads))  # type: ignore[operator]
        runs.append((run, run.op("cat", lambda *all_: np.concatenate(all_), *made, copies=True)))
    (parting,) = partings(*runs)
    assert (parting.a, parting.b) == ((f"r{planted + 1}:0",), (f"r{planted + 1}:0",))
