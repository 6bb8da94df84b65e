"""Each variation makes what it is for, and the same again from the same seed."""

from __future__ import annotations

import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.extensions.kernels.inputs import KernelInputs, meaning_of
from hashbench.extensions.kernels.variations import NAMES, VARIATIONS, Varied, chosen, flushed, generator_of, reductions

BY_NAME = {each.name: each for each in VARIATIONS}


def given(dtype: torch.dtype = torch.float32) -> KernelInputs:
    generator = torch.Generator().manual_seed(0)
    return KernelInputs.of(
        (torch.randn(12, 40, generator=generator).to(dtype), torch.rand(40, generator=generator) + 0.5), {}
    )


def varied(name: str, inputs: KernelInputs | None = None) -> list[Varied]:
    return list(BY_NAME[name].vary(inputs or given(), generator_of(7, name)))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_same_seed_makes_the_same(name: str) -> None:
    pairs = list(zip(varied(name), varied(name), strict=True))
    assert pairs
    for one, other in pairs:
        assert one.meaning == other.meaning
        for (_, left), (_, right) in zip(one.inputs.tensors(), other.inputs.tensors(), strict=True):
            assert left.stride() == right.stride()
            assert torch.equal(left.nan_to_num(7.0), right.nan_to_num(7.0))


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in ("nan", "inf", "zeros")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_was_positive_stays_so_and_all_is_finite(name: str, dtype: torch.dtype) -> None:
    for each in varied(name, given(dtype)):
        first, weight = each.inputs.leaves
        assert first.dtype is dtype
        assert bool(first.isfinite().all())
        assert meaning_of(weight).positive


def test_a_constant_gets_other_values() -> None:
    for each in varied("seeds", KernelInputs.of((torch.ones(8), torch.zeros(8)), {})):
        ones, zeros = each.inputs.leaves
        assert len(ones.unique()) == 8
        assert 0.5 <= float(ones.min()) <= float(ones.max()) <= 1.5
        assert len(zeros.unique()) == 8


def test_seeds_put_unsorted_indices_in_another_order_and_leave_sorted_ones() -> None:
    indices, offsets = torch.tensor([5, 1, 1, 9, 30, 2, 8]), torch.tensor([0, 2, 7])
    changed, kept = varied("seeds", KernelInputs.of((torch.rand(4, 31), indices, offsets), {}))[0].inputs.leaves[1:]
    assert changed.tolist() != indices.tolist()
    assert sorted(changed.tolist()) == sorted(indices.tolist())
    assert torch.equal(kept, offsets)


def test_sizes_are_near_their_own_larger_and_one() -> None:
    shapes = {tuple(each.inputs.leaves[0].shape) for each in varied("sizes")}
    assert shapes == {(12, 37), (12, 81), (12, 1), (11, 40), (25, 40), (1, 40), (11, 37)}


def test_the_other_sizes_of_large_inputs_are_cut() -> None:
    shapes = {
        tuple(each.inputs.leaves[0].shape) for each in varied("sizes", KernelInputs.of((torch.ones(512, 1024),), {}))
    }
    assert {(61, 1021), (61, 2049), (61, 1), (509, 61), (1025, 61), (1, 61), (257, 257)} == shapes


def test_an_integer_that_is_a_size_follows_and_may_stay() -> None:
    first = varied("sizes", KernelInputs.of((torch.randn(12, 40), 40), {}))[0]
    assert first.inputs.leaves[1] == first.inputs.leaves[0].shape[1] == 37
    assert [each.leaves[1] for each in first.follows] == [40]


@pytest.mark.parametrize("name", ["strides", "offset"])
def test_layouts_keep_the_values(name: str) -> None:
    inputs = given()
    for each in varied(name, inputs):
        assert each.layout
        for (_, left), (_, right) in zip(each.inputs.tensors(), inputs.tensors(), strict=True):
            assert torch.equal(left, right)


def test_strides_lie_apart_and_offsets_are_not_aligned() -> None:
    assert not any(each.inputs.leaves[0].is_contiguous() for each in varied("strides"))
    (moved,) = varied("offset")
    assert moved.inputs.leaves[0].is_contiguous()
    assert moved.inputs.leaves[0].storage_offset() == 1


def test_spikes_are_few_and_at_borders_of_blocks() -> None:
    (each,) = varied("spikes", KernelInputs.of((torch.randn(64, 300, generator=torch.Generator().manual_seed(0)),), {}))
    values = each.inputs.leaves[0]
    large = values.abs() > values.abs().max() / 2
    assert int(large.sum()) == 64
    assert {0, 15, 16, 127, 128, 255, 256, 299} <= set(large.nonzero()[:, 1].tolist())
    assert {-1.0, 1.0} == set(values[large].sign().tolist())


def test_integers_are_integers() -> None:
    (each,) = varied("integers")
    assert all(torch.equal(tensor, tensor.round()) for _, tensor in each.inputs.tensors())
    assert float(each.inputs.leaves[1].min()) == 1


def test_zeros_are_all_and_lines() -> None:
    every, lines = (each.inputs.leaves[0] for each in varied("zeros"))
    assert not bool(every.any())
    assert (lines == 0).all(1).tolist() == [row % 3 == 0 for row in range(12)]


def test_special_values_come_into_one_input_after_the_other() -> None:
    assert [each.meaning for each in varied("nan")] == ["NaN in input 0", "NaN in input 1"]
    first, *_ = varied("nan")
    assert first.inputs.leaves[0].isnan().sum() == 3
    assert not first.inputs.leaves[1].isnan().any()
    assert [each.meaning for each in varied("inf")] == [
        "infinities in input 0",
        "infinities in input 1",
        "negative infinities in input 0",
    ]


def test_denormals_are_a_third_and_flushed_to_zero() -> None:
    (each,) = varied("denormals")
    values, least = each.inputs.leaves[0], torch.finfo(torch.float32).tiny
    small = (values != 0) & (values.abs() < least)
    assert int(small.sum()) == 160
    assert torch.equal(flushed(each.inputs).leaves[0] == 0, small)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_magnitudes(dtype: torch.dtype) -> None:
    largest = [float(each.inputs.leaves[0].abs().max()) for each in varied("large", given(dtype))]
    assert 20 < largest[0] < 50
    assert (80 if dtype is torch.float16 else 700) < largest[1] < 1500
    assert all(0 < float(each.inputs.leaves[0].abs().max()) < 0.02 for each in varied("tiny", given(dtype)))


def test_masks_alone_make_no_variation() -> None:
    mask = KernelInputs.of((torch.tensor([0.0, 1.0] * 8), torch.arange(16)), {})
    for name in ("large", "tiny", "spikes", "integers", "zeros", "nan", "inf", "denormals", "seeds"):
        assert varied(name, mask) == []


def test_large_inputs_are_cut_and_small_ones_are_not() -> None:
    small = given()
    assert list(reductions(small)) == [small]
    large = KernelInputs.of((torch.zeros(1024, 2048), torch.zeros(2048), 2048), {})
    first, *_, last = reductions(large)
    assert [tuple(tensor.shape) for _, tensor in first.tensors()] == [(192, 256), (256,)]
    assert first.leaves[2] == 256
    assert last is large
    assert (128, 256) in [tuple(each.leaves[0].shape) for each in reductions(large)]


def test_unknown_names_are_refused_with_those_that_there_are() -> None:
    assert chosen(("nan", "sizes"), NAMES) == {"nan", "sizes"}
    with pytest.raises(HashbenchError, match=r"no variation 'nans': nothing was judged\. .* seeds, sizes"):
        chosen(("nans",), NAMES)
    with pytest.raises(HashbenchError, match="cannot be left out"):
        chosen(("given",), NAMES)
