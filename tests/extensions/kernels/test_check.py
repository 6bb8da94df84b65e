"""The verdict on kernels that are right, and on those that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.extensions.kernels.check import within_rounding
from hashbench.extensions.kernels.variations import NAMES
from hashbench.extensions.kernels.verdict import FaultKind, KernelOutcome, RoundingVerdict, VariationOutcome

X = torch.randn(24, 80, generator=torch.Generator().manual_seed(0))


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def by_hand(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    e = (wide - wide.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def outcomes(verdict: RoundingVerdict) -> dict[str, VariationOutcome]:
    return {each.name: each.outcome for each in verdict.variations}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_kernel_is_within_rounding_in_all_variations(dtype: torch.dtype) -> None:
    verdict = within_rounding(by_hand, softmax, X.to(dtype))
    assert verdict.outcome is KernelOutcome.WITHIN_ROUNDING
    assert verdict.faults == ()
    assert list(outcomes(verdict)) == list(NAMES)
    low = VariationOutcome.NOT_APPLICABLE if dtype is torch.float32 else VariationOutcome.WITHIN_ROUNDING
    assert outcomes(verdict) == dict.fromkeys(NAMES, VariationOutcome.WITHIN_ROUNDING) | {"float32": low}
    (output,) = verdict.outputs
    assert output.shape == (24, 80)
    assert len(output.picture) == 24
    assert max(map(len, output.picture)) == 64


def without_maximum(x: torch.Tensor) -> torch.Tensor:
    e = x.float().exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def first_rows_only(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[: len(x) - len(x) % 8] = by_hand(x)[: len(x) - len(x) % 8]
    return made


def of_memory(x: torch.Tensor) -> torch.Tensor:
    return by_hand(torch.as_strided(x, x.shape, (x.shape[1], 1), 0))


def hiding(x: torch.Tensor) -> torch.Tensor:
    return by_hand(x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")))


def with_eps(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-5)


@pytest.mark.parametrize(
    ("kernel", "reference", "variation"),
    [
        (lambda x: by_hand(x) * 1.01, softmax, "given"),
        (first_rows_only, softmax, "sizes"),
        (of_memory, softmax, "strides"),
        (without_maximum, softmax, "large"),
        (with_eps, rms_norm, "tiny"),
        (hiding, softmax, "nan"),
    ],
    ids=["scaled", "tail of rows", "ignores strides", "no maximum", "eps", "hides NaN"],
)
def test_a_wrong_kernel_is_found_by_the_variation_that_is_for_it(
    kernel: Callable[..., Any], reference: Callable[..., Any], variation: str
) -> None:
    x = X.bfloat16() if reference is rms_norm else X
    verdict = within_rounding(kernel, reference, x, without=("float32",))
    assert verdict.outcome is KernelOutcome.WRONG
    assert verdict.faults[0].variation == variation
    assert outcomes(verdict)[variation] is VariationOutcome.WRONG
    if variation != "given":
        others = within_rounding(kernel, reference, x, without=("float32", variation, *_related(variation)))
        assert others.right
        assert outcomes(others)[variation] is VariationOutcome.OFF


def _related(variation: str) -> tuple[str, ...]:
    """Variations that show the same fault."""
    return {"large": ("inf",), "strides": ("offset",), "tiny": ("denormals", "seeds")}.get(variation, ())


def test_a_kernel_in_bfloat16_is_looked_at_in_float32() -> None:
    def approximate(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.float(), approximate="tanh").to(x.dtype)

    def coarse(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x.bfloat16().float(), approximate="tanh").to(x.dtype)

    given = X.bfloat16()
    verdict = within_rounding(approximate, torch.nn.functional.gelu, given)
    assert outcomes(verdict)["float32"] is VariationOutcome.WRONG
    cast = within_rounding(coarse, torch.nn.functional.gelu, given)
    assert outcomes(cast)["float32"] is VariationOutcome.REFUSED


def test_refusals_are_told_and_not_blamed() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        assert x.shape[-1] == 80, "80 columns"
        return by_hand(x)

    verdict = within_rounding(kernel, softmax, X)
    assert verdict.right
    found = {each.name: each for each in verdict.variations}
    assert found["strides"].outcome is VariationOutcome.REFUSED
    assert "x must be contiguous" in found["strides"].reason
    assert found["sizes"].outcome is VariationOutcome.WITHIN_ROUNDING
    assert "80 columns" in found["sizes"].reason


def test_what_the_reference_refuses_is_told() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return softmax(x.view(24, 80))

    verdict = within_rounding(by_hand, reference, X)
    assert verdict.right
    assert outcomes(verdict)["sizes"] is VariationOutcome.NOT_DEFINED


def test_an_error_for_the_given_inputs_is_a_fault() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no such kernel for {x.dim()} dimensions")

    verdict = within_rounding(kernel, softmax, X)
    (fault,) = verdict.faults
    assert fault.kind is FaultKind.RAISED
    assert "no such kernel" in fault.detail
    assert outcomes(verdict)["seeds"] is VariationOutcome.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (lambda x: by_hand(x).double(), "output is float64[24, 80], that of the reference float32[24, 80]"),
        (lambda x: by_hand(x)[1:], "output is float32[23, 80]"),
        (lambda x: (by_hand(x), x), "returns 2 tensors, the reference 1 tensor"),
        (lambda x: x.copy_(by_hand(x)) and None, "returns no tensor"),
    ],
    ids=["dtype", "shape", "number", "none"],
)
def test_another_structure_is_a_fault(kernel: Callable[..., Any], words: str) -> None:
    def guarded(x: torch.Tensor) -> Any:
        try:
            return kernel(x)
        except RuntimeError:  # bool of a tensor of many elements
            return None

    verdict = within_rounding(guarded, softmax, X)
    structure = next(fault for fault in verdict.faults if fault.kind is FaultKind.STRUCTURE)
    assert words in structure.detail


def test_a_kernel_that_fills_its_argument_is_told_what_to_do() -> None:
    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(by_hand(x))

    def reference(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return softmax(x) + 0 * out.numel()

    (fault,) = within_rounding(kernel, reference, X, torch.zeros_like(X)).faults
    assert "writes input 1: give a function that returns what was written, as lambda" in fault.detail
    returning = within_rounding(lambda x, out: (kernel(x, out), out)[1], reference, X, torch.zeros_like(X))
    assert returning.right
    assert any("does not read" in remark for remark in returning.remarks)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (lambda x: torch.dropout(x, 0.5, train=True), "draws random numbers"),
        (lambda x: x.shape, "returns no tensor"),
        (lambda x: x @ x, "the reference raises RuntimeError"),
        (torch.empty_like, "memory that it does not write"),
    ],
    ids=["random", "no tensor", "raises", "unwritten"],
)
def test_what_cannot_be_judged_is_not_known(reference: Callable[..., Any], reason: str) -> None:
    def kernel(x: torch.Tensor) -> Any:
        return x.shape if reason == "returns no tensor" else x * 1

    verdict = within_rounding(kernel, reference, X)
    assert verdict.outcome is KernelOutcome.NOT_KNOWN
    assert reason in verdict.reason


def test_inputs_that_both_write_are_judged() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        x.mul_(2.01)
        return made

    assert within_rounding(kernel, lambda x: x.mul_(2), X).right
    verdict = within_rounding(wrong, lambda x: x.mul_(2), X)
    assert [fault.output for fault in verdict.faults] == ["input 0 afterwards"]


def test_habits_of_calls_are_faults() -> None:
    def unwritten(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        made[:16] = by_hand(x)[:16]
        return made

    kept: dict[torch.Size, torch.Tensor] = {}

    def stale(x: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(x.shape, by_hand(x)).clone()

    assert within_rounding(unwritten, softmax, X).faults[0].kind is FaultKind.UNWRITTEN
    assert within_rounding(stale, softmax, X).faults[0].kind is FaultKind.STALE
    writes = within_rounding(lambda x: x.copy_(by_hand(x)).clone(), softmax, X)
    assert [fault.kind for fault in writes.faults] == [FaultKind.WRITES_INPUT]


def test_what_an_approximation_claims_is_granted() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    assert not within_rounding(kernel, torch.nn.functional.gelu, X).right
    assert within_rounding(kernel, torch.nn.functional.gelu, X, approximate=1e-3, without=("tiny", "denormals")).right


def test_numpy_and_named_arguments() -> None:
    def kernel(x: np.ndarray[Any, Any], *, scale: float) -> np.ndarray[Any, Any]:
        with np.errstate(invalid="ignore"):
            e = np.exp((x - x.max(-1, keepdims=True)) * np.float32(scale))
        return e / e.sum(-1, keepdims=True)

    def reference(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return softmax(x * scale)

    assert within_rounding(kernel, reference, X.numpy(), kwargs={"scale": 0.5}).right
    off = within_rounding(lambda x, scale: kernel(x, scale=scale + 0.01), reference, X.numpy(), kwargs={"scale": 0.5})
    assert off.outcome is KernelOutcome.WRONG


class Scale(torch.autograd.Function):
    """``2 x``, whose gradient is right or scaled."""

    factor = 2.0

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @classmethod
    def backward(cls, _: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * cls.factor


class Scaled(Scale):
    factor = 2.02


def test_gradients_are_judged_when_asked() -> None:
    assert within_rounding(Scale, lambda x: x * 2, X, backward=True).right
    assert within_rounding(Scaled, lambda x: x * 2, X).right
    verdict = within_rounding(Scaled, lambda x: x * 2, X, backward=True)
    assert [fault.output for fault in verdict.faults] == ["gradient of input 0"]
    assert [output.name for output in verdict.outputs] == ["output", "gradient of input 0"]


def test_a_kernel_without_gradient_has_raised() -> None:
    (fault,) = within_rounding(lambda x: (x * 2).detach(), lambda x: x * 2, X, backward=True).faults
    assert (fault.kind, fault.output) == (FaultKind.RAISED, "gradient")


def test_time_is_bounded_and_the_given_inputs_are_judged() -> None:
    found = outcomes(within_rounding(by_hand, softmax, X, seconds=0.0))
    assert found.pop("given") is VariationOutcome.WITHIN_ROUNDING
    assert set(found.values()) - {VariationOutcome.NOT_APPLICABLE} == {VariationOutcome.OUT_OF_TIME}


def test_random_states_and_inputs_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    given = X.clone()
    within_rounding(by_hand, softmax, given, backward=True)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(given, X)


def test_the_same_seed_gives_the_same_verdict() -> None:
    one, other = (within_rounding(by_hand, softmax, X) for _ in range(2))
    assert [each.ratio for each in one.variations] == [each.ratio for each in other.variations]


def test_progress_names_each_variation() -> None:
    told: list[str] = []
    within_rounding(by_hand, softmax, X, progress=told.append)
    assert told == list(NAMES)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(HashbenchError, match="the kernel is a Tensor"):
        within_rounding(X, softmax, X)
    with pytest.raises(HashbenchError, match="no variation 'speed'"):
        within_rounding(by_hand, softmax, X, without=("speed",))


def test_a_fault_is_shown_by_the_smallest_inputs() -> None:
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(1))
    verdict = within_rounding(lambda x: x[:, :96].sum(1), lambda x: x.sum(1), x, without=tuple(set(NAMES) - {"given"}))
    (fault,) = verdict.faults
    assert fault.detail == "the sum of input 0 over dimension 1 lacks the last 4 elements"
    assert fault.example is not None
    assert fault.example.inputs[0].startswith("float32[1, 97], zeros but")
    assert fault.example.got == 0.0


def test_a_reference_that_reads_between_the_elements_has_them_there() -> None:
    """``as_strided`` reads the memory of its input, which a copy without gaps has not."""
    wide = torch.arange(64.0)[::2]
    verdict = within_rounding(lambda x: x.as_strided((32,), (1,)) * 1, lambda x: x.as_strided((32,), (1,)), wide)
    assert verdict.outputs[0].ratio == 0


def test_another_part_of_a_complex_number_that_is_not_finite_is_exchanged() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.isfinite(), torch.complex(x, x), complex(float("nan"), 0.0))

    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.isfinite(), torch.complex(x, x), complex(0.0, float("nan")))

    verdict = within_rounding(kernel, reference, X)
    assert verdict.right
    assert any("infinity" in remark for remark in verdict.remarks)


@pytest.mark.parametrize("used", [True, False], ids=["read", "not read"])
def test_a_weight_that_is_not_finite_does_not_end_the_verdict(used: bool) -> None:
    x, weight, bias = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(2)).unbind()
    weight, bias = weight[0].clone(), bias[0]
    weight[3] = torch.inf

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps) + bias.square()
        return normed * weight if used else normed

    verdict = within_rounding(lambda *given: norm(*given, 0.5), norm, x, weight, bias, without=NAMES[1:])
    assert verdict.outcome is KernelOutcome.WRONG
