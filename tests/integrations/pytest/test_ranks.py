"""``assert_ranks_deterministic`` in tests of this suite: factories on two ranks, clean and with a planted fault."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("shared_servers")

_CALLS = itertools.count(1)

Assert = Callable[..., None]


@torch.library.custom_op("rank_factories::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Add another number in each call."""
    return x + next(_CALLS) * 1e-3


class OnRankOne(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return counted(x) if dist.get_rank() == 1 else x


def clean() -> Any:
    return DistributedDataParallel(torch.nn.Linear(8, 4)), (torch.randn(4, 8),)


def planted() -> Any:
    net = torch.nn.Sequential(OnRankOne(), torch.nn.Linear(8, 4))
    return DistributedDataParallel(net), (torch.randn(4, 8),)


def raises() -> Any:
    raise ValueError(f"no data on rank {dist.get_rank()}")


@pytest.mark.slow
def test_a_clean_model_passes(assert_ranks_deterministic: Assert) -> None:
    assert_ranks_deterministic(clean)


@pytest.mark.slow
def test_rank_and_kernel_are_named(assert_ranks_deterministic: Assert) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        assert_ranks_deterministic(planted, ranks=2, diagnose=False)

    text = " ".join(str(failed.value).split())
    assert text.startswith("planted: runs differ in rank 0: ")
    assert "first divergence: rank_factories.counted.default (on rank 1 of 2, forward" in text
    assert " through: rank 1: rank_factories.counted -> all_reduce #1 of group 0-1 -> rank 0" in text


@pytest.mark.slow
def test_a_factory_that_raises_is_told_with_its_rank(assert_ranks_deterministic: Assert) -> None:
    with pytest.raises(
        pytest.fail.Exception, match="raises: the model could not be built: rank 0: ValueError: no data"
    ):
        assert_ranks_deterministic(raises, ranks=1)


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (lambda: clean(), {}, "the ranks cannot import"),
        (clean, {"ranks": 0}, "ranks must be an int >= 1, got 0"),
        (clean, {"stress": True}, "has no option stress; it has ranks, training, device, runs"),
        (torch.ones(2), {}, "needs a function that builds a model, not a Tensor"),
    ],
)
def test_what_cannot_be_run_is_refused(
    assert_ranks_deterministic: Assert, factory: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match=words):
        assert_ranks_deterministic(factory, **options)
