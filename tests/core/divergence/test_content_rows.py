"""Tensors correspond by rows: packed beside padded, decoded beside the full forward, one item beside a batch."""

from __future__ import annotations

import numpy as np

from hashbench.core.divergence.content import ContentAlignment
from hashbench.core.divergence.content_align import align_contents
from tests.core.divergence.content_graphs import Array, Run

X: Array = np.random.default_rng(0).standard_normal((6, 8))
OTHERS: Array = np.random.default_rng(1).standard_normal((3, 8))
W: Array = np.random.default_rng(2).standard_normal((8, 8))


def model(*inputs: Array, spoiled: int = -1) -> Run:
    """Call one function on each input; it goes wrong at one row of the last."""

    def function(x: Array, w: Array) -> Array:
        y = np.tanh(x @ w)
        if spoiled >= 0:
            y[spoiled, 3] += 1e-3
        return y

    run = Run()
    w = run.weight("w", W)
    for index, values in enumerate(inputs):
        run.op("tanh", function, run.leaf(f"x{index}", values), w)
    return run


def aligned(a: Run, b: Run) -> ContentAlignment:
    return align_contents(a.graph(), b.graph())


def test_decoded_tokens_correspond_to_the_tensor_of_all() -> None:
    """One token is missing, so that they do not add up to it."""
    a, b = model(X), model(X[:3], X[3:4], X[4:5])
    alignment = aligned(a, b)
    x, y = dict.fromkeys(("x0", "x1", "x2"), ("x0",)), dict.fromkeys(("r1:0", "r2:0", "r3:0"), ("r1:0",))
    assert alignment.rows == x | y
    assert alignment.covered == set(a.nodes)
    assert all(alignment.partners[node] == () for node in alignment.rows)


def test_a_wrong_token_does_not_correspond_while_the_others_do() -> None:
    alignment = aligned(model(X), model(X[:3], X[3:5], spoiled=1))
    assert set(alignment.rows) == {"x0", "x1"}


def test_a_full_forward_corresponds_to_decoded_tokens() -> None:
    alignment = aligned(model(X[:3], X[3:5]), model(X))
    assert alignment.rows == {"x0": ("x0", "x1"), "r1:0": ("r1:0", "r2:0")}


def test_a_full_forward_with_one_wrong_token_does_not_although_others_are_right() -> None:
    alignment = aligned(model(X[:3], X[3:5]), model(X, spoiled=4))
    assert alignment.rows == {"x0": ("x0", "x1")}
    assert alignment.covered == {"w", "x0", "x1", "r1:0"}


def test_a_batch_corresponds_to_one_item_of_it() -> None:
    batch = np.concatenate([OTHERS, X])
    assert aligned(model(X), model(batch)).rows == {"x0": ("x0",), "r1:0": ("r1:0",)}
    assert aligned(model(batch), model(X)).rows == {"x0": ("x0",), "r1:0": ("r1:0",)}


def test_a_batch_that_is_wrong_at_the_item_does_not() -> None:
    batch = np.concatenate([OTHERS, X])
    assert aligned(model(X), model(batch, spoiled=4)).rows == {"x0": ("x0",)}


def test_padding_that_holds_anything_is_no_hindrance() -> None:
    padded = np.concatenate([X, np.full((4, 8), 7.0)])
    assert aligned(model(X), model(padded)).rows == {"x0": ("x0",), "r1:0": ("r1:0",)}


def test_what_is_one_token_often_does_not_correspond_to_all_tokens() -> None:
    """The last row everywhere: each row is there, but once."""
    assert aligned(model(X), model(np.repeat(X[-1:], 6, 0))).rows == {}


def test_rows_of_integers_or_of_one_number_are_no_evidence() -> None:
    a, b = Run(), Run()
    a.leaf("ids", np.arange(12.0).reshape(3, 4))
    b.leaf("ids", np.arange(4.0)[None])
    a.leaf("uniform", np.repeat([[1 / 3], [1 / 7], [1 / 9]], 8, 1))
    b.leaf("uniform", np.full((1, 8), 1 / 7))
    assert aligned(a, b).rows == {}


def test_an_op_without_comparable_rows_corresponds_if_it_is_called_alike() -> None:
    """Means of rows are one number each: the same op with the same scalars on what corresponds."""
    runs = [Run(), Run(), Run()]
    for run, values, dim in zip(runs, (X, X[:2], X[:2]), ("-1", "-1", "-2"), strict=True):
        x = run.leaf("x", values)
        mean = run.op("mean", lambda x: x.mean(-1, keepdims=True), x, scalars=dim)
        run.op("add", lambda x: x + 1e-6, mean, scalars="1e-06")
    for run in runs:
        run.without_rows("r1:0", "r2:0")
    assert aligned(runs[0], runs[1]).rows == {"x": ("x",), "r1:0": ("r1:0",), "r2:0": ("r2:0",)}
    assert aligned(runs[0], runs[2]).rows == {"x": ("x",)}
