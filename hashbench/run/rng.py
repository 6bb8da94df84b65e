"""Random state: the global generators of Python, NumPy and torch seeded, read, compared and put back."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import _disable_current_modes

GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
"""The classes of all generators: torch's, NumPy's and Python's."""


# -------------------------------------------------------------------------------------------- all of them at once


def reset_rng_state(seed: int = 1337) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    ``torch.manual_seed`` seeds that of the CPU and those of every CUDA, ROCm, XPU, MPS and MTIA device and of a private
    backend that has ``manual_seed_all``; of a device that is not in use yet as soon as it is.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the global generators of Python, NumPy and torch back on leaving, those of every device that is in use."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    put_back = [restore for module in _modules_in_use() if (restore := _restorer(module)) is not None]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for restore in put_back:
            restore()


def _modules_in_use() -> Iterator[Any]:
    """torch's modules of the kinds of device that this process uses. To ask for a device that nobody has used would
    start it, and a process in which CUDA has started cannot fork any more children that use it."""
    for name in ("cuda", "xpu", "mtia", "mps", torch._C._get_privateuse1_backend_name()):
        module = getattr(torch, name, None)
        in_use = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
        if in_use is not None and in_use():
            yield module


def _restorer(module: Any) -> Callable[[], object] | None:
    """What puts the generators of all devices of a kind back to what they are now; ``None`` where its module cannot
    say. Modules of one device (MPS) know no ``…_all``."""
    names = set(dir(module))
    if {"get_rng_state_all", "set_rng_state_all"} <= names:
        return functools.partial(module.set_rng_state_all, module.get_rng_state_all())
    if not {"get_rng_state", "set_rng_state"} <= names:
        return None
    if "device_count" not in names or module.device_count() < 2:
        return functools.partial(module.set_rng_state, module.get_rng_state())
    states = [module.get_rng_state(index) for index in range(module.device_count())]
    return lambda: [module.set_rng_state(state, index) for index, state in enumerate(states)]


# ------------------------------------------------------------------------------------------------ states as tensors


def random_states(device: torch.device | None, *, outside_torch: bool) -> dict[str, torch.Tensor]:
    """The states of the default generators of the host and of ``device`` (``None``: of every device in use) by name:
    ``cpu``, ``cuda:0``; with ``outside_torch`` also of ``python`` and ``numpy``, which no kernel of torch's reads."""
    states = {"cpu": torch.get_rng_state()}
    if device is None:
        kind = _accelerator()
        if kind and getattr(torch, kind).is_initialized():
            all_states = getattr(torch, kind).get_rng_state_all()
            states |= {f"{kind}:{index}": state for index, state in enumerate(all_states)}
    elif device.type != "cpu":
        index = device.index if device.index is not None else torch.accelerator.current_device_index()
        states[f"{device.type}:{index}"] = getattr(torch, device.type).get_rng_state(index)
    if outside_torch:
        states["python"] = python_state()
        if np.random.get_state(legacy=False)["bit_generator"] == "MT19937":
            states["numpy"] = numpy_state()
    return states


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
    state: Any = np.random.get_state(legacy=False)
    words, position = state["state"]["key"].tolist(), state["state"]["pos"]
    return torch.tensor([*words, position, state["has_gauss"], _bits(state["gauss"])], dtype=torch.int64)


def set_numpy_state(state: torch.Tensor) -> None:
    """Put back what :func:`numpy_state` found."""
    *words, position, waits, bits = state.tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, waits, _number(bits)))


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


# ------------------------------------------------------------------------------------------------- one generator


def is_generator(value: Any) -> bool:
    """Whether ``value`` is a generator of random numbers with a state of its own."""
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def state_digest(generator: Any) -> str:
    """16 hexadecimal digits for the state of one generator, of one of the classes in :data:`GENERATORS`; nothing is
    drawn from it."""
    state = state_value(state_access(generator)[0]())
    return xxhash.xxh3_64_hexdigest(state if isinstance(state, bytes) else repr(state).encode())


def state_access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """What reads and what writes the state of a generator of one of the classes in :data:`GENERATORS`."""
    if isinstance(generator, torch.Generator):
        return _disable_current_modes()(generator.get_state), generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return lambda: generator.get_state(legacy=False), generator.set_state
    source = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return lambda: source.state, lambda state: setattr(source, "state", state)


def state_value(value: Any) -> Any:
    """A state in a form that ``==`` compares whole."""
    if isinstance(value, torch.Tensor):
        return ctypes.string_at(value.data_ptr(), value.nbytes)  # not .numpy(), which is an op
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return {key: state_value(item) for key, item in value.items()} if isinstance(value, dict) else value


def global_state_digests(private: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The states of Python's, NumPy's and torch's global generators (on accelerators in use, too), and of ``private``
    ones by name."""
    digests = {"python": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode())}
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None:
        digests["numpy"] = state_digest(numpy._rand)
    digests["torch"] = state_digest(torch.default_generator)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states = torch.cuda.get_rng_state_all()
        digests["cuda"] = xxhash.xxh3_64_hexdigest(b"".join(bytes(state.tolist()) for state in states))
    return digests | {name: state_digest(generator) for name, generator in (private or {}).items()}
