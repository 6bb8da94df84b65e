"""Contents of two runs correspond by what they hold: whole, in parts, as copies, and never by chance."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashbench.core.divergence.content import ContentAlignment, Kind
from hashbench.core.divergence.content_align import align_contents
from tests.core.divergence.content_graphs import Array, Run


def random(seed: int, *shape: int) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape))


def aligned(a: Run, b: Run) -> ContentAlignment:
    return align_contents(a.graph(), b.graph())


def with_input(*shape: int) -> tuple[Run, str]:
    run = Run()
    return run, run.leaf("x", random(0, *shape))


def test_neither_name_nor_shape_nor_order_of_elements_matters() -> None:
    a, b = Run(), Run()
    a.leaf("tokens", random(0, 2, 5, 4))
    b.leaf("x", random(0, 2, 5, 4).transpose(1, 0, 2).reshape(10, 4))
    assert aligned(a, b).partners == {"x": ("tokens",)}


def test_padding_with_zeros_is_not_seen() -> None:
    a, b = Run(), Run()
    a.leaf("x", random(0, 5, 4))
    b.leaf("x", np.concatenate([random(0, 5, 4), np.zeros((3, 4))]))
    assert aligned(a, b).partners == {"x": ("x",)}


def test_one_changed_element_is_seen() -> None:
    a, b = with_input(50, 4), Run()
    changed = random(0, 50, 4)
    changed[7, 2] += 1e-6
    b.leaf("x", changed)
    assert aligned(a[0], b).partners == {}


def test_a_lower_dtype_behind_an_op_is_allowed_for() -> None:
    (a, _), b = with_input(50, 4), Run()
    b.leaf("x", random(0, 50, 4) * (1 + 1e-7))
    b.tolerate("x", 1e-5)
    assert aligned(a, b).partners == {"x": ("x",)}


def test_of_several_that_hold_the_same_the_one_of_the_same_op_is_the_partner() -> None:
    runs = []
    for _ in range(2):
        run, x = with_input(5, 4)
        y = run.op("exp", np.exp, x)
        run.op("clone", lambda y: y, y, copies=True)
        runs.append(run)
    assert aligned(*runs).partners == {"x": ("x",), "r1:0": ("r1:0",), "r2:0": ("r2:0",)}


WEAK = {
    "zeros": np.zeros(6),
    "ones": np.ones(6),
    "a mask": np.tril(np.ones((3, 3))),
    "a mask of infinities": np.where(np.tril(np.ones((3, 3))) > 0, 0.0, -np.inf),
    "one round number": np.array(2.5),
}


@pytest.mark.parametrize("values", WEAK.values(), ids=WEAK)
def test_data_equal_by_chance_do_not_correspond(values: Array) -> None:
    """A constant there, a wrong result here."""
    (a, _), (b, x) = with_input(5, 4), with_input(5, 4)
    a.constant("full", values)
    wrong = b.op("mul", lambda _: values, x)
    assert wrong not in aligned(a, b).partners


@pytest.mark.parametrize("values", WEAK.values(), ids=WEAK)
def test_data_equal_by_chance_correspond_if_the_same_op_made_them_of_data_that_correspond(values: Array) -> None:
    runs = [with_input(5, 4) for _ in range(2)]
    for run, x in runs:
        run.op("gt", lambda _: values, x)
    alignment = aligned(runs[0][0], runs[1][0])
    assert alignment.partners["r1:0"] == ()
    assert "r1:0" in alignment.covered


def test_one_number_that_is_not_round_is_no_chance() -> None:
    runs = [with_input(5, 4) for _ in range(2)]
    for (run, x), op in zip(runs, ("mean", "sum"), strict=True):
        run.op(op, lambda x: x.mean(), x)
    assert aligned(runs[0][0], runs[1][0]).partners["r1:0"] == ("r1:0",)


def qkv(a: Run, b: Run) -> tuple[list[str], str]:
    """Three products in ``a``, one in ``b``."""
    weights = [random(seed, 4, 3) for seed in (1, 2, 3)]
    x = a.leaf("x", random(0, 5, 4))
    parts = [a.op("mm", np.matmul, x, a.weight(f"w{i}", w)) for i, w in enumerate(weights)]
    y = b.leaf("x", random(0, 5, 4))
    return parts, b.op("mm", np.matmul, y, b.weight("w", np.concatenate(weights, 1)))


def test_a_fused_tensor_has_its_parts_as_partners() -> None:
    a, b = Run(), Run()
    parts, fused = qkv(a, b)
    alignment = aligned(a, b)
    assert alignment.partners[fused] == tuple(parts)
    assert alignment.partners["w"] == ("w0", "w1", "w2")
    assert alignment.covered == set(a.nodes)


def test_a_part_of_a_fused_tensor_knows_it_and_has_no_partner() -> None:
    a, b = Run(), Run()
    parts, fused = qkv(b, a)
    alignment = aligned(a, b)
    assert {part: alignment.part_of[part] for part in parts} == dict.fromkeys(parts, fused)
    assert [alignment.partners[part] for part in parts] == [(), (), ()]
    assert fused in alignment.covered


def test_halves_that_are_computed_in_turns_are_found() -> None:
    """Rotary embedding: one product on one side, two on the other, with others between them."""
    (a, x), (b, y) = with_input(5, 8), with_input(5, 8)
    whole = a.op("mul", lambda x: x * 1.7, x)
    left, right = b.outputs("split", lambda x: (x[:, :4], x[:, 4:]), y)
    b.op("mul", lambda x: 1.7 * x, left)
    b.op("mul", lambda x: 0.3 * x, right)
    b.op("mul", lambda x: 1.7 * x, right)
    alignment = aligned(a, b)
    assert whole in alignment.covered
    assert alignment.part_of == {"r1:0": "x", "r1:1": "x", "r2:0": whole, "r4:0": whole}
    assert "r3:0" not in alignment.partners


def test_experts_that_alternate_with_their_second_products_are_found() -> None:
    a, b = Run(), Run()
    hidden = [random(seed, 3, 4) for seed in range(8)]
    x = a.leaf("x", np.stack(hidden))
    fused = a.op("bmm", np.exp, x)
    y = b.leaf("x", np.stack(hidden))
    for index in range(8):
        part = b.op("index", lambda x, index=index: x[index], y, copies=True)
        b.op("mm", lambda x: np.sin(x) + x, b.op("mm", np.exp, part))
    assert fused in aligned(a, b).covered


def test_nothing_is_the_sum_of_itself_and_zeros() -> None:
    (a, x), b = with_input(5, 4), Run()
    a.op("mul", lambda x: 0 * x, a.op("mul", lambda x: 2 * x, x))
    b.op("mul", lambda x: x, b.leaf("x", random(9, 5, 4)))
    assert aligned(a, b).partners == {}


def test_copies_of_what_corresponds_correspond() -> None:
    (a, x), (b, y) = with_input(5, 4), with_input(5, 4)
    a.op("flip", lambda x: x[:2], x, copies=True)
    b.op("repeat", lambda x: np.concatenate([x, x]), y, copies=True)
    alignment = aligned(a, b)
    assert alignment.partners == {"x": ("x",), "r1:0": ()}
    assert alignment.covered == {"x", "r1:0"}


@pytest.mark.parametrize("kind", [Kind.CONSTANT, Kind.INPUT])
def test_a_copy_that_sets_elements_to_zero_is_none(kind: Kind) -> None:
    runs = []
    for diagonal in (1, 2):
        run = Run()
        run.op("triu", lambda x, d=diagonal: np.triu(x, d), run.leaf("x", random(0, 6, 6), kind), copies=True)
        runs.append(run)
    assert aligned(*runs).partners == {"x": ("x",)}


def test_a_part_of_a_constant_is_no_copy() -> None:
    runs = []
    for length in (3, 4):
        run = Run()
        run.op("slice", lambda x, n=length: x[:n], run.leaf("cos", random(0, 6, 6), Kind.CONSTANT), copies=True)
        runs.append(run)
    assert aligned(*runs).partners == {"cos": ("cos",)}


@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_any_run_corresponds_to_itself_cut_and_permuted(seed: int, parts: int, depth: int) -> None:
    generator = np.random.default_rng(seed)
    a, b = Run(), Run()
    values = generator.standard_normal((6, 2 * parts))
    x, y = a.leaf("x", values), b.leaf("y", generator.permutation(values))
    for _ in range(depth):
        factor = generator.standard_normal()
        x = a.op("mul", lambda v, f=factor: v * f, x)
        pieces = b.outputs("split", lambda v: np.split(v, parts, 1), y)
        y = b.op("cat", lambda *v: np.concatenate(v, 1), *[b.op("mul", lambda v, f=factor: v * f, p) for p in pieces])
    alignment = aligned(a, b)
    assert alignment.covered == set(a.nodes)
    assert alignment.partners.keys() == set(b.nodes)


def test_thousands_of_nodes_are_aligned_by_sorting() -> None:
    """All against all would take minutes. The bound is far above what is needed, and far below that."""
    runs = []
    for order in (1, -1):
        run = Run()
        x = run.leaf("x", random(0, 8, 4))
        for step in range(3000)[::order]:
            run.op("mul", lambda x, f=step: x * (1 + f / 3000), x)
        runs.append(run)
    began = time.process_time()
    alignment = aligned(*runs)
    assert time.process_time() - began < 20
    assert len(alignment.partners) == 3001
