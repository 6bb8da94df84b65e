"""Global generators are seeded and restored, on every device in use."""

from __future__ import annotations

import random
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch

from hashbench.core.run.rng import preserved_rng, reset_rng_state


def draws() -> tuple[float, float, float]:
    """One number of each global generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("seed", [0, 2**32 - 1, 2**40])
def test_host_generators_are_reset_and_restored(seed: int) -> None:
    reset_rng_state(3)
    expected = draws()
    reset_rng_state(3)
    with suppress(ZeroDivisionError), preserved_rng():
        reset_rng_state(seed)
        assert torch.initial_seed() == seed
        first = draws()
        reset_rng_state(seed)
        assert draws() == first
        reset_rng_state(8)
        assert all(new != old for new, old in zip(draws(), first, strict=True))
        if seed:
            raise ZeroDivisionError
    assert draws() == expected


PRIVATE = torch._C._get_privateuse1_backend_name()


class Backend:
    """torch's module of a kind of device with two of them, each of which has a number for a generator."""

    def __init__(self, *, in_use: bool = True) -> None:
        self.in_use = in_use
        self.states = [1, 2]

    def is_initialized(self) -> bool:
        return self.in_use

    def is_available(self) -> bool:
        raise AssertionError("this starts the driver")

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, device: int = 0) -> int:
        return self.states[device]

    def set_rng_state(self, state: int, device: int = 0) -> None:
        self.states[device] = state

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.states = [seed] * len(self.states)


class OneDevice:
    """As MPS has it: it cannot say whether it is in use."""

    def __init__(self) -> None:
        self.states = [1]

    def is_available(self) -> bool:
        return True

    def get_rng_state(self) -> int:
        return self.states[0]

    def set_rng_state(self, state: int) -> None:
        self.states = [state]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        self.states = [seed]


class Silent:
    """Of a private backend that has no states to tell."""

    def is_initialized(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("xpu", Backend(), id="of two devices"),
        pytest.param(PRIVATE, Backend(), id="of a private backend"),
        pytest.param("mps", OneDevice(), id="of one device"),
    ],
)
def test_device_generators_are_reset_and_restored(
    name: str, backend: Backend | OneDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, name, backend, raising=False)
    monkeypatch.setitem(sys.modules, f"torch.{name}", backend)
    before = list(backend.states)
    with preserved_rng():
        reset_rng_state(7)
        assert backend.states == [7] * len(before)
    assert backend.states == before


@pytest.mark.parametrize("backend", [Silent(), Backend(in_use=False)], ids=["it cannot say", "not in use"])
def test_unused_device_generators_are_left_alone(backend: Silent | Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, PRIVATE, backend, raising=False)
    with preserved_rng():
        if isinstance(backend, Backend):
            backend.states = [5, 6]
    assert not isinstance(backend, Backend) or backend.states == [5, 6]
