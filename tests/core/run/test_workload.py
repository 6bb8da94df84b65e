"""A workload's required fields, its call, the clones of its inputs, and default losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hashbench.core.run.workload import (
    Workload,
    cache_among,
    call,
    cast_inputs,
    cast_module,
    clone_inputs,
    mean_of_outputs,
    random_projection,
)


def test_workload_needs_inputs() -> None:
    with pytest.raises(ValueError, match=r"needs inputs or make_inputs.*Pass inputs=\(tensor,\)"):
        Workload(torch.nn.Identity())
    assert Workload(torch.nn.Identity(), make_inputs=lambda: ()).inputs is None


@pytest.mark.parametrize("inputs", [(2.0, 3.0), [2.0, 3.0], {"y": 3.0, "x": 2.0}], ids=["tuple", "list", "mapping"])
def test_call_passes_inputs_by_position_or_name(inputs: Any) -> None:
    class Divides(torch.nn.Module):
        def forward(self, x: float, y: float = 1.0) -> float:
            return x / y

    assert call(Divides(), inputs) == 2 / 3
    assert call(Divides(), 5.0) == 5.0


def test_clones_keep_strides_overlap_and_gradients() -> None:
    base = torch.arange(6.0)
    inputs = {"t": [base.reshape(2, 3).t().requires_grad_()], "expanded": base[:1].expand(4), "flag": True}

    copied = clone_inputs(inputs)

    for old, new in ((inputs["t"][0], copied["t"][0]), (inputs["expanded"], copied["expanded"])):
        assert torch.equal(old, new)
        assert (new.stride(), new.requires_grad) == (old.stride(), old.requires_grad)
        assert new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr()
    assert copied["flag"] is True
    assert copied["t"] is not inputs["t"]


@pytest.mark.parametrize("view", [lambda x: x[::2], lambda x: x[1:].view(3, 3)[:, 0], lambda x: x[:4].expand(2, 4)])
def test_casts_keep_strides_gaps_and_overlap(view: Any) -> None:
    tensor = view(torch.arange(10.0))
    module = torch.nn.Module()
    module.register_buffer("part", tensor)
    module.register_buffer("whole", torch.arange(4.0))
    (cast,) = cast_inputs([tensor], torch.float64)
    held = cast_module(module, torch.float64).get_buffer("part")
    assert {str(one.dtype) for one in module.buffers()} == {"torch.float64"}
    for one in (cast, held):
        assert (one.dtype, one.stride(), one.tolist()) == (torch.float64, tensor.stride(), tensor.tolist())
        assert one.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        if tensor.dim() == 1:
            assert one.as_strided((3,), (1,)).tolist() == tensor.as_strided((3,), (1,)).tolist()


def test_casts_leave_integers_and_gradients_as_they_are() -> None:
    number, real = cast_inputs((torch.arange(3), torch.ones(2, requires_grad=True)), torch.bfloat16)
    assert (number.dtype, real.dtype, real.requires_grad, real.is_leaf) == (torch.int64, torch.bfloat16, True, True)


def test_mean_loss_averages_the_means_of_outputs() -> None:
    first, second = (torch.tensor(numbers, requires_grad=True) for numbers in ([1.0, 3.0], [10.0]))
    assert mean_of_outputs({"a": first, "b": [second, torch.tensor([99.0]), torch.tensor([1])]}).item() == 6.0


def test_random_projection_depends_on_the_seed_alone() -> None:
    x = torch.ones(5, requires_grad=True)
    state = torch.get_rng_state()
    losses = [random_projection(x, seed=seed).item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("loss", [mean_of_outputs, lambda output: random_projection(output, seed=1)])
def test_loss_needs_a_gradient(loss: Any) -> None:
    with pytest.raises(RuntimeError, match="no output of the model has a gradient"):
        loss(torch.ones(3))


def test_cache_is_found_by_its_known_names() -> None:
    assert [cache_among(names) for names in ({"x", "cache"}, ["state", "past_key_values"], {"x"})] == [
        "cache",
        "past_key_values",
        "",
    ]
