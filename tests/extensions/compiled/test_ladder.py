"""Which backend first computes something else than eager mode?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from hashbench.extensions.compiled.ladder import BACKENDS, LIMIT, Ladder, Rung, Semantic, climb
from hashbench.extensions.compiled.units import EXPLAINED
from tests.extensions.compiled.steps import InFloat32, Norms, OnRounding, Step, ZeroGradient, made, step_of

THIRD = torch.tensor([1 / 3, 1.0], dtype=torch.float64)

Values = Mapping[Any, torch.Tensor | Exception]


def planned(values: Values, asked: list[tuple[Any, torch.dtype | None]] | None = None) -> Step:
    """A model whose result is given by backend; in float32 in its own dtype, and of a third everywhere else."""

    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        if asked is not None:
            asked.append((backend, dtype))
        found = values.get((backend, dtype), values.get(backend, THIRD))
        if isinstance(found, Exception):
            raise found
        return {"output": found if dtype == torch.float64 else found.float()}

    return run


def stage_of(values: Values, **options: Any) -> tuple[str, Semantic]:
    ladder = climb(planned(values), **options)
    return ladder.stage, ladder.semantic


WRONG, BROKEN = THIRD * 1.001, RuntimeError("cannot")


@pytest.mark.parametrize(
    ("values", "stage"),
    [
        pytest.param({}, "", id="nothing is wrong"),
        pytest.param({"eager": WRONG, "aot_eager": WRONG}, "dynamo", id="graphs of dynamo"),
        pytest.param({"aot_eager": WRONG}, "aot_autograd", id="graphs of AOTAutograd"),
        pytest.param({"aot_eager_decomp_partition": WRONG}, "decomposition", id="decompositions"),
        pytest.param({"inductor": WRONG}, "inductor", id="generated code"),
        pytest.param({"aot_eager": BROKEN}, "aot_autograd", id="it raises"),
        pytest.param({"inductor": BROKEN}, "inductor", id="the last raises"),
        pytest.param({"inductor": THIRD * (1 + 2**-50)}, "", id="rounding of float64"),
    ],
)
def test_the_first_backend_that_differs_gives_the_stage(values: Values, stage: str) -> None:
    ladder = climb(planned(values), backends=("eager", "aot_eager", "aot_eager_decomp_partition", "inductor"))
    assert ladder.stage == stage
    broken = any(isinstance(value, Exception) for value in values.values())
    assert ladder.semantic is (Semantic.UNKNOWN if broken else Semantic.YES if stage else Semantic.NO)
    assert not stage or ladder.rungs[-1].raised == ("RuntimeError: cannot" if broken else "")


@pytest.mark.parametrize("backend", ["inductor", "inductor@cuda:90"])
def test_inductor_is_compared_whatever_device_it_makes_code_for(backend: str) -> None:
    assert stage_of({}, backends=(*BACKENDS, backend)) == ("", Semantic.NO)
    assert stage_of({backend: WRONG}, backends=(*BACKENDS, backend)) == ("inductor", Semantic.YES)


def test_no_backend_runs_behind_the_first_that_differs() -> None:
    asked: list[Any] = []
    ladder = climb(planned({"eager": WRONG}, asked))
    assert [rung.backend for rung in ladder.rungs] == ["eager"]
    assert not {"aot_eager", "aot_eager_decomp_partition"} & {backend for backend, _ in asked}


def test_without_inductor_nothing_is_known_to_be_right() -> None:
    ladder = climb(planned({}))
    assert (ladder.stage, ladder.semantic, ladder.reason) == (
        "",
        Semantic.UNKNOWN,
        "inductor was not compared in float64",
    )


@pytest.mark.parametrize(
    ("given", "stage", "semantic"),
    [
        pytest.param({"output": THIRD}, "", Semantic.NO, id="equal"),
        pytest.param({"output": WRONG}, "inductor", Semantic.YES, id="different"),
    ],
)
def test_results_of_inductor_may_come_from_elsewhere(given: Any, stage: str, semantic: Semantic) -> None:
    asked: list[Any] = []
    ladder = climb(planned({}, asked), inductor=given)
    assert (ladder.stage, ladder.semantic) == (stage, semantic)
    assert "inductor" not in {backend for backend, _ in asked}


def test_an_exception_of_inductor_may_come_from_elsewhere() -> None:
    ladder = climb(planned({"inductor": BROKEN}), inductor=BROKEN)
    assert (ladder.stage, ladder.rungs[-1].raised) == ("inductor", "RuntimeError: cannot")


def test_what_raises_in_float64_only_is_passed_over() -> None:
    ladder = climb(planned({("aot_eager", torch.float64): BROKEN, "aot_eager_decomp_partition": WRONG}))
    assert [rung.backend for rung in ladder.rungs] == ["eager", "aot_eager", "aot_eager_decomp_partition"]
    assert ladder.stage == "decomposition"
    ladder = climb(planned({("aot_eager", torch.float64): BROKEN}), inductor={"output": THIRD})
    assert (ladder.stage, ladder.semantic) == ("", Semantic.UNKNOWN)
    assert ladder.reason == "aot_eager raises in float64 only: RuntimeError: cannot"


@pytest.mark.parametrize(
    ("aot", "stage"), [pytest.param(THIRD, "", id="all run"), pytest.param(BROKEN, "aot_autograd", id="one raises")]
)
def test_a_model_that_does_not_run_in_float64_is_unknown(aot: Any, stage: str) -> None:
    asked: list[Any] = []
    ladder = climb(planned({(None, torch.float64): BROKEN, "aot_eager": aot}, asked))
    assert (ladder.stage, ladder.semantic, ladder.dtype) == (stage, Semantic.UNKNOWN, None)
    assert ladder.reason.startswith("eager mode does not run in float64: RuntimeError: cannot")
    assert {dtype for _, dtype in asked[1:]} == {None}
    assert ladder.measured == (not stage)


NEVER = {(None, torch.float64): BROKEN}
OWN_DTYPE: dict[str, tuple[Mapping[Any, torch.Tensor], str]] = {
    "a mistake of some percent": ({"aot_eager_decomp_partition": THIRD * 1.14}, "decomposition"),
    "a factor, which cosine similarity does not see": ({"eager": THIRD * 2, "aot_eager": THIRD * 2}, "dynamo"),
    "some ulps": ({"aot_eager": THIRD * (1 + 2**-20)}, ""),
    "no more than random roundings change": ({"inductor": torch.tensor([9.0, 1.0])}, ""),
}


@pytest.mark.parametrize("case", OWN_DTYPE)
def test_without_float64_backends_are_compared_in_the_own_dtype(case: str) -> None:
    values, stage = OWN_DTYPE[case]

    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        if callable(backend):
            moved = torch.tensor([8.0, 1.0]) if "random" in case else values.get("eager", THIRD) * (1 + 2**-23)
            return {"output": moved.float()}
        return planned({**NEVER, **values})(backend, dtype)

    ladder = climb(run, backends=(*BACKENDS, "inductor"))
    assert (ladder.stage, ladder.semantic, ladder.dtype) == (stage, Semantic.UNKNOWN, None)
    assert ladder.measured


def test_the_own_dtype_alone_may_be_asked_for() -> None:
    ladder = climb(planned({}), backends=(), inductor={"output": WRONG.float() * 2}, dtype=None)
    assert (ladder.stage, ladder.reason) == ("inductor", "")
    ladder = climb(planned({None: BROKEN}), backends=("eager",))
    assert (ladder.stage, ladder.measured) == ("", False)


def test_a_model_in_float64_is_measured_by_what_it_loses_in_float32() -> None:
    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        value = THIRD.to(dtype or torch.float64)
        return {"output": value * (1 + 2**-50) if backend == "eager" else value}

    (first, *_) = climb(run).rungs
    assert first.error is not None
    assert 0 < first.error < 1e-6


def test_the_worst_result_is_named() -> None:
    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        wrong = {"a": 1.001, "b": 1.1} if backend == "eager" else {}
        return {name: (THIRD * wrong.get(name, 1.0)).to(dtype or torch.float32) for name in ("a", "b", "c")}

    assert climb(run).rungs[0].result == "b"


def test_a_result_that_one_side_lacks_is_zero_there() -> None:
    """AOTAutograd returns zeros for gradients that eager mode does not make."""

    def run(backend: Any, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
        found = {"output": THIRD.to(dtype or torch.float32)}
        if backend == "eager":
            found["gradient"] = torch.zeros(3, dtype=dtype)
        if backend == "aot_eager":
            found["gradient"] = torch.ones(3, dtype=dtype)
        return found

    ladder = climb(run)
    assert ladder.rungs[0].error == 0.0
    assert (ladder.stage, ladder.rungs[-1].result) == ("aot_autograd", "gradient")


@pytest.mark.parametrize(
    ("error", "rounding", "beyond"),
    [
        pytest.param(None, None, False, id="not measured"),
        pytest.param(LIMIT, None, False, id="at the limit"),
        pytest.param(2 * LIMIT, None, True, id="beyond it"),
        pytest.param(2 * LIMIT, 1e-9, True, id="beyond what rounding explains"),
        pytest.param(10.0, 10.0 / EXPLAINED, False, id="explained by rounding"),
        pytest.param(float("inf"), 1.0, True, id="integers differ, and not by rounding"),
        pytest.param(float("inf"), float("inf"), False, id="integers differ by rounding"),
    ],
)
def test_rule_of_the_limit(error: float | None, rounding: float | None, beyond: bool) -> None:
    assert Rung("eager", error, rounding=rounding).beyond is beyond


# ------------------------------------------------------------------------------------------------------- real programs


@pytest.fixture(autouse=True)
def _harness_random() -> Iterator[None]:
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield
    torch._dynamo.reset()


def separation(ladder: Ladder) -> list[float]:
    return [rung.error for rung in ladder.rungs if rung.error is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(Norms, (6, 8), id="layer norm"), pytest.param(ZeroGradient, (2, 3, 8, 8), id="zero gradient")],
)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param(torch.float64, marks=pytest.mark.exhaustive),
    ],
)
def test_a_right_model_is_right_on_every_rung(kind: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    began = time.monotonic()
    ladder = climb(step_of(made(kind).to(dtype), [torch.randn(shape).to(dtype)]))
    assert time.monotonic() - began < 60  # 1.5 s on a calm machine
    assert len(ladder.rungs) == 3
    assert max(separation(ladder)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OnRounding, InFloat32])
def test_what_rounding_explains_is_no_mistake(kind: Callable[[], torch.nn.Module]) -> None:
    ladder = climb(step_of(made(kind), [torch.randn(64, 8)]))
    assert ladder.stage == ""
    assert len(ladder.rungs) == 3
    assert max(separation(ladder)) > LIMIT
    assert "no more than rounding explains" in ladder.reason


@pytest.mark.slow
def test_a_lower_dtype_is_named() -> None:
    ladder = climb(step_of(made(InFloat32), [torch.randn(64, 8)]))
    assert "aten._to_copy.default computes in a lower dtype" in ladder.reason


@pytest.mark.slow
def test_a_wrong_decomposition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.decomposition import decompositions

    elu = torch.ops.aten.elu.default
    right = decompositions[elu]
    step = step_of(made(Norms), [torch.randn(6, 8)])
    monkeypatch.setitem(decompositions, elu, lambda *args, **kwargs: right(*args, **kwargs) * 1.001)
    ladder = climb(step)
    assert (ladder.stage, ladder.semantic) == ("decomposition", Semantic.YES)
    assert [error < 1e-6 for error in separation(ladder)] == [True, True, False]
    assert separation(ladder)[-1] > 100
