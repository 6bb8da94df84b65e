"""The states of the global generators as tensors, which can be written to a file and read back safely.

By name: ``cpu``, ``cuda:0`` and so on for default generators of torch; ``python`` and ``numpy`` for those of
``random`` and ``numpy.random``.
"""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device | None, *, outside_torch: bool) -> dict[str, torch.Tensor]:
    """The states of the default generators of the host and of ``device`` (``None``: of every device in use); with
    ``outside_torch`` also those of Python and NumPy, which no kernel of torch's reads."""
    states = {"cpu": torch.get_rng_state()}
    if device is None:
        states |= _accelerator_states()
    elif device.type != "cpu":
        index = device.index if device.index is not None else torch.accelerator.current_device_index()
        states[f"{device.type}:{index}"] = getattr(torch, device.type).get_rng_state(index)
    if outside_torch:
        states["python"] = python_state()
        if np.random.get_state(legacy=False)["bit_generator"] == "MT19937":
            states["numpy"] = numpy_state()
    return states


def _accelerator_states() -> dict[str, torch.Tensor]:
    kind = _accelerator()
    backend = getattr(torch, kind) if kind else None
    if backend is None or not backend.is_initialized():
        return {}
    return {f"{kind}:{index}": state for index, state in enumerate(backend.get_rng_state_all())}


@functools.cache
def _accelerator() -> str:
    """The type of the accelerator of this process, which never changes; empty without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if device is None else device.type


def restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Put the default generators back to what :func:`random_states` found."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == "python":
            set_python_state(state)
        elif name == "numpy":
            set_numpy_state(state)
        else:
            device = torch.device(name)
            getattr(torch, device.type).set_rng_state(state, device.index)


def python_state() -> torch.Tensor:
    """The state of ``random`` as ``int64``: version, its 625 words, whether a Gaussian number waits, and its bits."""
    version, words, waiting = random.getstate()
    return torch.tensor([version, *words, int(waiting is not None), _bits(waiting or 0.0)], dtype=torch.int64)


def set_python_state(state: torch.Tensor) -> None:
    """Put back what :func:`python_state` found."""
    version, *words, waits, bits = state.tolist()
    random.setstate((version, tuple(words), _number(bits) if waits else None))


def numpy_state() -> torch.Tensor:
    """The state of ``numpy.random`` as ``int64``: its 624 words, the position, and the same about a Gaussian number."""
    found: Any = np.random.get_state(legacy=False)
    words, position = found["state"]["key"].tolist(), found["state"]["pos"]
    return torch.tensor([*words, position, found["has_gauss"], _bits(found["gauss"])], dtype=torch.int64)


def set_numpy_state(state: torch.Tensor) -> None:
    """Put back what :func:`numpy_state` found."""
    *words, position, waits, bits = state.tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, waits, _number(bits)))


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
