"""What kind of fault a wrong result shows: planted mistakes, each told as what it is, and what may look alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.run.rounding_judge import Bias
from hashbench.extensions.kernels.kind import kind_of
from hashbench.extensions.kernels.verdict import FaultKind
from tests.extensions.kernels.judgements import drawn, judged, result_of

X = drawn(64, 128)
A, B = drawn(48, 256), drawn(256, 40, seed=6)
BATCH, OTHER = drawn(3, 16, 64), drawn(3, 24, 64, seed=6)


def _patched(tensor: torch.Tensor, at: Any, value: Any) -> torch.Tensor:
    changed = tensor.clone()
    changed[at] = value
    return changed


def _softmax_without_the_last_tile(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    top = x.amax(1, keepdim=True)
    return ((x - top).exp() / (x - top)[:, :-32].exp().sum(1, keepdim=True)).float()


def _scan_that_forgets(x: torch.Tensor, block: int) -> torch.Tensor:
    return torch.cat([part.cumsum(1) for part in x.double().split(block, 1)], 1).float()


def _layer_norm_biased(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    mean = x[:, :-8].mean(1, keepdim=True)
    return ((x - mean) / (x.var(1, keepdim=True, correction=0) + 0.3).sqrt()).float()


SUM = X.double().sum(1)
PRODUCT = A.double() @ B.double()
NORM = torch.nn.functional.layer_norm(X.double(), (128,))
_INDEX = torch.arange(200) * 13 % 20
_ROWS = drawn(200, 32, seed=3)
_GRADIENT = torch.zeros(20, 32).index_add(0, _INDEX, _ROWS)
_LOST_ROWS = torch.zeros(20, 32).index_add(0, _INDEX[160:], _ROWS[160:])
TAIL = (slice(None), slice(-5, None))
Case = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
FAULTS: dict[tuple[FaultKind, str], Case] = {
    (FaultKind.NON_FINITE, "nan where the reference has -?[0-9.]+"): (_patched(X, TAIL, torch.nan), X, {}),
    (FaultKind.NON_FINITE, "inf where the reference has nan"): (
        _patched(X, 3, torch.inf),
        _patched(X, 3, torch.nan),
        {},
    ),
    (FaultKind.NON_FINITE, "0 where the reference has nan"): (_patched(X, 3, 0.0), _patched(X, 3, torch.nan), {}),
    (FaultKind.NON_FINITE, "nan where .*"): (
        _patched(_patched(X, (3, slice(None, 70)), torch.nan), (4, slice(None, 50)), 9.0),
        X,
        {},
    ),
    (FaultKind.SCALED, r"by 1\.02"): (X * 1.02, X, {}),
    (FaultKind.SCALED, r"by 0\.9922 \(127/128\)"): ((X.double() * 127 / 128).float(), X, {}),
    (FaultKind.SCALED, r"by 1\.443 \(log2 e\)"): (X * 1.4426950408889634, X, {}),
    (FaultKind.SCALED, "by 2"): (2 * X, X, {}),
    (FaultKind.SCALED, "the sign is the opposite"): (_patched(X, TAIL, -X[TAIL]), X, {}),
    (FaultKind.SCALED, r"each row by a factor of its own, 1\.\d+ to 2?1?\.\d+"): (
        _softmax_without_the_last_tile(X),
        X.double().softmax(1),
        {"input 0": X},
    ),
    (FaultKind.SCALED, "each column by a factor of its own, 0.*"): (X * torch.linspace(0.1, 0.9, 128), X, {}),
    (FaultKind.SCALED, "each row by a factor and a constant of its own, .*"): (_layer_norm_biased(X), NORM, {}),
    (FaultKind.SHIFTED, r"by 0\.1"): (X + 0.1, X, {}),
    (FaultKind.SHIFTED, "by 1"): ((X * 9).long() + 1, (X * 9).long(), {}),
    (FaultKind.SHIFTED, "each row by a constant of its own, .*"): (
        (X.double().log_softmax(1) + SUM[:, None] / 9).float(),
        X.double().log_softmax(1),
        {"input 0": X},
    ),
    (FaultKind.LOST_ELEMENTS, "the sum of input 0 over dimension 1 lacks the last 5 elements"): (
        X.double()[:, :-5].sum(1).float(),
        SUM,
        {"input 0": X},
    ),
    (FaultKind.LOST_ELEMENTS, "the sum of input 0 over dimension 0 lacks element 17"): (
        (X.double().sum(0) - X[17].double()).float(),
        X.double().sum(0),
        {"input 0": X},
    ),
    (FaultKind.LOST_ELEMENTS, "the mean of input 0 over dimension 1 lacks elements 32 to 63"): (
        (X.double().mean(1) - X[:, 32:64].double().sum(1) / 128).float(),
        X.double().mean(1),
        {"input 0": X},
    ),
    (FaultKind.LOST_ELEMENTS, "the sum of the square of input 0 over dimension 1 lacks the first element"): (
        X.double()[:, 1:].square().sum(1).float(),
        X.double().square().sum(1),
        {"input 0": X},
    ),
    (FaultKind.LOST_ELEMENTS, "the product of input 0 and input 1 lacks the last element"): (
        (A.double()[:, :-1] @ B.double()[:-1]).float(),
        PRODUCT,
        {"input 0": A, "input 1": B},
    ),
    (FaultKind.LOST_ELEMENTS, "the product of q and k counts twice the last 3 elements"): (
        (BATCH.double() @ OTHER.double().mT + BATCH.double()[..., -3:] @ OTHER.double()[..., -3:].mT).float(),
        BATCH.double() @ OTHER.double().mT,
        {"q": BATCH, "k": OTHER},
    ),
    (
        FaultKind.LOST_ELEMENTS,
        "the error is constant between jumps at every 32nd column from 32 on: what comes before is lost there",
    ): (_scan_that_forgets(X, 32), X.double().cumsum(1), {"input 0": X}),
    (FaultKind.LOST_ELEMENTS, "the product of input 0 and input 1 lacks every 32nd element from 32 to 192"): (
        (PRODUCT - A.double()[:, 32:200:32] @ B.double()[32:200:32]).bfloat16(),
        PRODUCT,
        {"input 0": A, "input 1": B},
    ),
    (FaultKind.LOST_ELEMENTS, "row 0 lacks input 0 at 160, 180, where input 1 names it"): (
        _GRADIENT - _LOST_ROWS,
        _GRADIENT,
        {"input 0": _ROWS, "input 1": _INDEX},
    ),
    (FaultKind.LOST_ELEMENTS, "input 1 is not added"): (X, X.double() + NORM, {"input 0": X, "input 1": NORM.float()}),
    (FaultKind.BEYOND_ROUNDING, "input 1 is added once too often"): (
        X + 2 * X[0],
        X.double() + X[0].double(),
        {"input 0": X, "input 1": X[0]},
    ),
    (FaultKind.BEYOND_ROUNDING, r"the error is 0\.01 times input 0"): (
        (X.double().exp() + 0.01 * X).float(),
        X.double().exp(),
        {"input 0": X},
    ),
    (FaultKind.SCALED, "each row by a factor and a constant of its own before input 1 and input 2, .*"): (
        (_layer_norm_biased(X) * X[0] + X[1]),
        NORM * X[0] + X[1],
        {"input 0": X, "input 1": X[0], "input 2": X[1]},
    ),
    (FaultKind.UNWRITTEN, "numbers of all sizes, .*"): (
        _patched(X, TAIL, torch.logspace(-30, 30, 320).view(64, 5)),
        X,
        {},
    ),
    (FaultKind.DISPLACED, "input 1 is read at other places: its last two dimensions are transposed"): (
        X[:, :64] + X[:, 64:].T,
        X[:, :64].double() + X[:, 64:].double(),
        {"input 0": X[:, :64], "input 1": X[:, 64:]},
    ),
    (FaultKind.SCALED, "by 2; nan where the reference has .* as well"): (_patched(2 * X, 3, torch.nan), X, {}),
    (FaultKind.NON_FINITE, r"nan where the reference has .* \(1\.[56] % of what is wrong\)"): (
        _patched(X + drawn(64, 128, seed=9), 3, torch.nan),
        X,
        {},
    ),
    (FaultKind.DISPLACED, "its last two dimensions are transposed"): (X[:, :64].T.contiguous(), X[:, :64], {}),
    (FaultKind.DISPLACED, "shifted by 1 along dimension 0"): (X.roll(1, 0), X, {}),
    (FaultKind.DISPLACED, "shifted by -8 along dimension 1"): (X.roll(-8, 1), X, {}),
    (FaultKind.DISPLACED, "reversed along dimension 1"): (X.flip(1), X, {}),
    (FaultKind.DISPLACED, "the memory is that of the transpose"): (X.T.reshape(64, 128), X, {}),
    (FaultKind.DISPLACED, "the memory is read as that of the transpose"): (X.reshape(128, 64).T.contiguous(), X, {}),
    (FaultKind.DISPLACED, "row [0-9]+ has the values of [0-9]+"): (
        X[torch.randperm(64, generator=torch.Generator().manual_seed(1))],
        X,
        {},
    ),
    (FaultKind.DISPLACED, "row 7 repeated"): (_patched(X, slice(8, 16), X[7]), X, {}),
    (FaultKind.DISPLACED, r"\[0\] has the value of \[[0-9]+\]"): (
        drawn(4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(1))],
        drawn(4096),
        {},
    ),
    (FaultKind.ZEROS, "it is 0 there"): (_patched(X, TAIL, 0.0), X, {}),
    (FaultKind.ZEROS, "it is 0 everywhere"): (torch.zeros(64, 128), X, {}),
    (FaultKind.LOWER_PRECISION, "each result is a bfloat16 number"): (X.bfloat16().float(), X, {}),
    (FaultKind.LOWER_PRECISION, "each result is a float16 number"): (X.half().float(), X, {}),
    (FaultKind.LOWER_PRECISION, "each result is a TensorFloat-32 number"): (
        (((1e6 * X).view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32),
        1e6 * X,
        {},
    ),
    (FaultKind.LOWER_PRECISION, "errors are as large as the roundoff of bfloat16, .*"): (
        X * (1 + 2**-9 * drawn(64, 128, seed=9)),
        X,
        {},
    ),
    (FaultKind.APPROXIMATION, r"the error is a smooth function of input 0, at most 0\.000.* of the largest result"): (
        torch.nn.functional.gelu(X.double(), approximate="tanh").float(),
        torch.nn.functional.gelu(X.double()),
        {"input 0": X},
    ),
    (FaultKind.BEYOND_ROUNDING, r"the error is a smooth function of input 0, at most 0\.\d+ of the largest result"): (
        (X * torch.sigmoid(2 * X)),
        torch.nn.functional.silu(X.double()),
        {"input 0": X},
    ),
    (FaultKind.BEYOND_ROUNDING, r"by up to \d\.\d+"): (X + drawn(64, 128, seed=9), X, {"input 0": X}),
    (FaultKind.BEYOND_ROUNDING, "by up to .*: each is smaller in magnitude.*"): (
        X * drawn(64, 128, seed=9).abs().clamp(0.01, 0.99),
        X,
        {"input 0": X},
    ),
}
"""Results, what they should be, and inputs, by what is said of them."""


@pytest.mark.parametrize("told", FAULTS, ids=lambda told: f"{told[0]}: {told[1]}")
def test_planted_mistakes(told: tuple[FaultKind, str]) -> None:
    got, exact, inputs = FAULTS[told]
    kind, detail, _ = kind_of(judged(got, exact), got, inputs=inputs)
    assert kind is told[0], detail
    assert re.fullmatch(told[1], detail)


LOW: dict[FaultKind, Callable[[torch.Tensor], torch.Tensor]] = {
    FaultKind.DISPLACED: lambda x: x.roll(1, 0),
    FaultKind.SCALED: lambda x: x * 1.5,
    FaultKind.SHIFTED: lambda x: x + 0.75,
    FaultKind.ZEROS: lambda x: _patched(x, TAIL, 0.0),
}


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_low_precision(kind: FaultKind, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    got = LOW[kind](x)
    assert kind_of(judged(got, x.double()), got, inputs={"input 0": x})[0] is kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_kind(dtype: torch.dtype, seed: int) -> None:
    x = drawn(64, 128, seed=seed).to(dtype)
    got = (x.double() * (1 + 0.7 * drawn(64, 128, seed=seed + 50))).to(dtype)
    inputs = {"input 0": x, "input 1": drawn(128, seed=seed), "input 2": drawn(64, 40), "input 3": drawn(40, 128)}
    assert kind_of(judged(got, x), got, inputs=inputs)[0] is FaultKind.BEYOND_ROUNDING


def test_what_an_earlier_call_left() -> None:
    before = drawn(64, 128, seed=8)
    got = _patched(X, slice(32, 48), before[32:48])
    kind, detail, doubt = kind_of(judged(got, X), got, earlier=[drawn(64, 128, seed=11), before])
    assert (kind, detail, doubt) == (FaultKind.STALE, "the result of an earlier call", "")
    ones = torch.ones(64, 128)
    assert "few different values" in kind_of(judged(ones, X), ones, earlier=[ones])[2]
    zeros = torch.zeros(64, 128)
    assert kind_of(judged(zeros, X), zeros, earlier=[zeros])[0] is FaultKind.ZEROS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_memory_that_was_not_written(dtype: torch.dtype) -> None:
    x = (X * 100).to(dtype)
    got = x.clone()
    got[TAIL] = torch.full((dtype.itemsize,), 0x3F, dtype=torch.uint8).view(dtype)[0]
    kind, detail, doubt = kind_of(judged(got, x), got, poison=(0x40, 0x3F))
    assert kind is FaultKind.UNWRITTEN
    assert re.fullmatch("it has the .* that memory was filled with", detail)
    assert not doubt


def test_an_accumulator_that_starts_with_what_memory_holds() -> None:
    filled = torch.full((4,), 0x40, dtype=torch.uint8).view(torch.float32)
    got = X + filled
    kind, detail, _ = kind_of(judged(got, X), got, poison=(0x3F, 0x40))
    assert (kind, detail) == (FaultKind.UNWRITTEN, "the result and the 3.004 that memory was filled with are added up")


def test_the_sign_of_zero() -> None:
    exact = _patched(X, 3, 0.0)
    got = _patched(X, 3, -0.0)
    found = judged(got, exact)
    assert kind_of(found, got)[0] is FaultKind.SIGN_OF_ZERO
    wrong = replace(found, beyond=torch.zeros_like(found.beyond).index_fill(0, torch.tensor(3), True))
    assert kind_of(wrong, got)[:2] == (FaultKind.SIGN_OF_ZERO, "-0 for 0")


@pytest.mark.parametrize(
    ("direction", "slope", "kind", "words"),
    [
        ("result", 0.01, FaultKind.SCALED, "by 1.01 (3.1 roundoffs in the mean, 40 standard errors of rounding)"),
        ("result at dimension 1, 96 to 127", -0.5, FaultKind.SCALED, "by 0.5 at dimension 1, 96 to 127 ("),
        ("constant", 0.25, FaultKind.SHIFTED, "by 0.25 ("),
        ("sign of the result", -0.125, FaultKind.BEYOND_ROUNDING, "towards zero by 0.125 ("),
        ("magnitude of the result", 0.125, FaultKind.BEYOND_ROUNDING, "upwards by 0.125 of the magnitude ("),
    ],
)
def test_a_direction_without_wrong_elements(direction: str, slope: float, kind: FaultKind, words: str) -> None:
    found, detail, doubt = kind_of(judged(X, X, Bias(direction, slope, 3.1, 40.0)), X)
    assert found is kind
    assert detail.startswith(words)
    assert doubt


def test_odd_results() -> None:
    x = drawn(25, 7)
    assert kind_of(judged(x + 1 + x.exp(), x), x + 1 + x.exp(), inputs={"input 0": x})[0] in FaultKind
    for got, exact in (
        (torch.tensor(2.0), torch.tensor(1.0)),
        (torch.tensor([True, False]), torch.tensor([False, False])),
        (torch.ones(3, 1, 4), torch.zeros(3, 1, 4)),
        (torch.ones(5, dtype=torch.int64), torch.arange(5)),
    ):
        kind, _, _ = kind_of(
            judged(got, exact), got, earlier=[exact], poison=(0x3F,), inputs={"input 0": torch.ones(3)}
        )
        assert kind in FaultKind


def test_complex_results() -> None:
    x = torch.complex(X, drawn(64, 128, seed=8))
    error = (x * 1j - x).to(torch.complex128)
    units = error.abs() / 1e-6
    found = result_of(error, units, x.to(torch.complex128))
    assert kind_of(found, x * 1j)[:2] == (FaultKind.SCALED, "by 0+1j")


def test_what_only_the_mean_shows_is_told_by_the_terms_that_are_lost() -> None:
    a, b = A.bfloat16(), B.bfloat16()
    exact = a.double() @ b.double()
    got = (a.double()[:, :-4] @ b.double()[:-4]).bfloat16()
    found = judged(got, exact, Bias("result", -0.015, 3.0, 9.0))
    found = replace(found, units=found.units / 20, beyond=torch.zeros_like(found.beyond))
    kind, detail, doubt = kind_of(found, got, inputs={"input 0": a, "input 1": b})
    assert (kind, detail) == (FaultKind.LOST_ELEMENTS, "the product of input 0 and input 1 lacks the last 4 elements")
    assert doubt
    doubled = (2 * exact).bfloat16()
    found = judged(doubled, exact, Bias("result", 1.0, 256.0, 90.0))
    found = replace(found, units=found.units / 1e4, beyond=torch.zeros_like(found.beyond))
    assert kind_of(found, doubled, inputs={"input 0": a, "input 1": b})[0] is FaultKind.SCALED


def test_one_element_is_no_sum_by_chance() -> None:
    got, exact = torch.tensor(0.53), torch.tensor(0.91)
    kind, _, _ = kind_of(judged(got.half(), exact), got.half(), inputs={"input 0": drawn(400), "input 1": drawn(400)})
    assert kind is FaultKind.BEYOND_ROUNDING


def test_one_factor_for_all_is_not_told_where_each_row_has_its_own() -> None:
    x = X.bfloat16()
    got = (x.double() * torch.linspace(0.2, 0.3, 64)[:, None]).bfloat16()
    found = judged(got, x)
    found = replace(found, units=found.units / 4, beyond=found.units > 64)
    assert kind_of(found, got)[1].startswith("each row by a factor of its own")
