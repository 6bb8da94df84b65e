"""Whether a compiled run is accurate: torch's own decision, with the tolerance of the harness."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from hashbench.extensions.compiled.accuracy import (
    LOOSE,
    TIGHT,
    Farther,
    Tolerance,
    by_cosine_only,
    farther,
    inaccurate,
    tolerance_of,
    worse,
)

Results = Mapping[str, torch.Tensor]
EXACT = {"output.0": torch.linspace(1, 2, 8, dtype=torch.float64)}
EAGER = {"output.0": EXACT["output.0"].float()}


@pytest.mark.parametrize(
    ("suite", "training", "device", "dtype", "tolerance"),
    [
        ("torchvision", True, "cpu", "", TIGHT),
        ("torchvision", True, "cuda:1", "", LOOSE),
        ("torchvision", False, "cuda", "", TIGHT),
        ("torchvision", False, "cpu", "amp", LOOSE),
        ("timm", True, "cpu", "", 1e-2),
        ("timm", False, "cpu", "", 1e-3),
        ("huggingface_tiny", True, "cpu", "", 1e-2),
        ("/some/zoo.py", False, "cpu", "", TIGHT),
    ],
)
def test_tolerances_are_those_of_the_harness(
    suite: str, training: bool, device: str, dtype: str, tolerance: float
) -> None:
    assert tolerance_of(suite, training=training, device=device, dtype=dtype) == Tolerance(tolerance)


@pytest.mark.parametrize(("off", "names"), [(0.0, ()), (1e-6, ()), (1e-2, ("output.0",))])
def test_results_beyond_the_tolerance_are_named(off: float, names: tuple[str, ...]) -> None:
    compiled = {"output.0": EAGER["output.0"] + off}
    assert inaccurate(EAGER, compiled, EXACT, Tolerance(1e-4)) == names


def test_nearer_to_float64_than_eager_mode_is_accurate() -> None:
    eager = {"output.0": EAGER["output.0"] + 0.01}
    assert inaccurate(eager, EAGER, EXACT, Tolerance(1e-4)) == ()
    assert inaccurate(eager, EAGER, None, Tolerance(1e-7)) == ()  # the cosine of almost parallel vectors
    assert inaccurate(eager, {"output.0": -EAGER["output.0"]}, None, Tolerance(1e-7)) == ("output.0",)


def test_missing_results_of_another_dtype_and_unknown_types_are_inaccurate() -> None:
    assert inaccurate(EAGER, {}, EXACT, Tolerance(1e-4)) == ("output.0",)
    assert inaccurate(EAGER, {"output.0": EXACT["output.0"]}, EXACT, Tolerance(1e-4)) == ("output.0",)
    words = {"output.0": "text"}
    assert inaccurate(words, {"output.0": "text"}, None, Tolerance(1e-4)) == ()
    assert inaccurate(words, {"output.0": "other"}, None, Tolerance(1e-4)) == ("output.0",)


def test_a_reference_that_moved_is_told() -> None:
    moved = {"output.0": EAGER["output.0"] + 0.01}
    found = farther(moved, EAGER, EXACT, Tolerance(1e-4))
    assert isinstance(found, Farther)
    assert found.name == "output.0"
    assert found.eager > 100 * found.compiled
    assert farther(EAGER, moved, EXACT, Tolerance(1e-4)) is None  # the compiled model moved
    assert farther(EAGER, EAGER, EXACT, Tolerance(1e-4)) is None
    assert farther(moved, EAGER, None, Tolerance(1e-4)) is None
    assert farther({"a": 1, "b": torch.zeros(0)}, {"a": 2, "b": torch.zeros(0)}, {}, Tolerance(1e-4)) is None


SMALL = {"grad": EXACT["output.0"] * 1e-6}
COSINE: dict[str, tuple[Results, Results | None, list[tuple[str, float]]]] = {
    "a factor": ({"output.0": EAGER["output.0"] * 1.5}, None, [("output.0", 0.5)]),
    "within the tolerance": ({"output.0": EAGER["output.0"] + 1e-6}, None, []),
    "a reference decides": ({"output.0": EAGER["output.0"] * 1.5}, EXACT, []),
    "not accepted": ({"output.0": -EAGER["output.0"]}, None, []),
    "different shape": ({"output.0": EAGER["output.0"][:3]}, None, []),
}


@pytest.mark.parametrize("case", COSINE)
def test_what_cosine_similarity_alone_accepts_is_told(case: str) -> None:
    compiled, exact, expected = COSINE[case]
    found = by_cosine_only(EAGER, compiled, exact, Tolerance(1e-4))
    assert [(one.name, round(one.off, 3)) for one in found] == expected


def test_a_result_far_from_float64_is_told_within_the_tolerance_too() -> None:
    eager = {name: value.float() for name, value in SMALL.items()}
    twice = {"grad": eager["grad"] * 2}
    assert inaccurate(eager, twice, SMALL, Tolerance(1e-4)) == ()  # it is absolute, too
    found = worse(eager, twice, SMALL)
    assert found is not None
    assert (found.name, round(found.off, 3)) == ("grad", 1.0)
    assert found.eager is not None
    assert found.eager < 1e-6
    assert worse(eager, {"grad": eager["grad"] * (1 + 2**-20)}, SMALL) is None  # a sum in another order
    assert worse(twice, twice, SMALL) is None  # eager mode loses as much
    assert worse(eager, twice, None) is None
