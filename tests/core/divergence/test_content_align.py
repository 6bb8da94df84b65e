"""Contents of two runs correspond by what they hold, and the first op whose data agree is where the runs part."""

from __future__ import annotations

import numpy as np

from hashbench.core.divergence.content_align import align_contents
from hashbench.core.divergence.content_walk import find_partings
from tests.core.divergence.content_graphs import Array, Run


def random(seed: int, *shape: int) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape))


def mlp(scale: float = 1.0) -> Run:
    run = Run()
    x, w, v = run.leaf("x", random(0, 5, 4)), run.weight("w", random(1, 4, 6)), run.weight("v", random(2, 6, 3))
    h = run.op("mm", np.matmul, x, w)
    g = run.op("tanh", lambda h: np.tanh(scale * h), h)
    run.op("mm", np.matmul, g, v)
    return run


def test_a_changed_op_is_named_on_both_sides() -> None:
    a, b = mlp().graph(output="r3:0"), mlp(1.001).graph(output="r3:0")
    alignment = align_contents(a, b)
    assert alignment.partners == {name: (name,) for name in ("x", "w", "v", "r1:0")}
    (parting,) = find_partings(a, b, alignment)
    assert (parting.a, parting.b, parting.agree, parting.results) == (
        ("r2:0",),
        ("r2:0",),
        (("r1:0", "r1:0"),),
        ("output",),
    )
