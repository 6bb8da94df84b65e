"""Seed, read, compare and restore random states: the global generators of Python, NumPy and torch."""

from __future__ import annotations

import ctypes
import inspect
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

from hashbench.core.trace.digest import unobserved

GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)
"""All generator classes of torch, NumPy and Python."""


# -------------------------------------------------------------------------------------------- all of them at once


def reset_rng_state(seed: int = 1337) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    ``torch.manual_seed`` seeds the CPU, every CUDA, ROCm, XPU, MPS and MTIA device, and a private backend with
    ``manual_seed_all``; a device that is not initialised yet is seeded on initialisation.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch's CPU alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch on exit, on the CPU and every initialised device."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), random_states(None, outside_torch=False)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        restore_random_states(of_torch)


# ------------------------------------------------------------------------------------------------ states as tensors


def random_states(device: torch.device | None, *, outside_torch: bool) -> dict[str, torch.Tensor]:
    """Return the states of the default generators of the CPU and of ``device``, by name: ``cpu``, ``cuda:0``, ``mps``.

    Args:
        device: ``None`` for every initialised device.
        outside_torch: also return ``python`` and ``numpy``, which torch's kernels never read, as ``int64``: state
            words, further fields, whether a Gaussian number is cached, and its bits.
    """
    states = {"cpu": torch.get_rng_state()}
    if device is None:
        states |= _states_in_use()
    elif device.type != "cpu":
        index = device.index if device.index is not None else torch.accelerator.current_device_index()
        states[f"{device.type}:{index}"] = getattr(torch, device.type).get_rng_state(index)
    if outside_torch:
        version, words, waiting = random.getstate()
        python = [version, *words, int(waiting is not None), _bits(waiting or 0.0)]
        states["python"] = torch.tensor(python, dtype=torch.int64)
        numpy: Any = np.random.get_state(legacy=False)
        if numpy["bit_generator"] == "MT19937":
            words, position = numpy["state"]["key"].tolist(), numpy["state"]["pos"]
            values = [*words, position, numpy["has_gauss"], _bits(numpy["gauss"])]
            states["numpy"] = torch.tensor(values, dtype=torch.int64)
    return states


def _states_in_use() -> dict[str, torch.Tensor]:
    """Return the states of all initialised devices whose module can read and set them.

    Reading an uninitialised device would initialise it, and a process that initialised CUDA cannot fork children that
    use it.
    """
    states: dict[str, torch.Tensor] = {}
    for kind in ("cuda", "xpu", "mtia", "mps", torch._C._get_privateuse1_backend_name()):
        module: Any = getattr(torch, kind, None)
        in_use = getattr(module, "is_initialized", None) or getattr(module, "is_available", None)
        if in_use is None or not in_use() or not {"get_rng_state", "set_rng_state"} <= set(dir(module)):
            continue
        if inspect.signature(module.get_rng_state).parameters:
            states |= {f"{kind}:{index}": module.get_rng_state(index) for index in range(module.device_count())}
        else:  # one device, as MPS has it
            states[kind] = module.get_rng_state()
    return states


def states_differ(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a generator changed state; both mappings are from :func:`random_states`, same generators."""
    return any(not torch.equal(state, after[name]) for name, state in before.items())


def restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the default generators to the states from :func:`random_states`."""
    for name, state in states.items():
        kind, _, index = name.partition(":")
        if kind == "cpu":
            torch.set_rng_state(state)
        elif kind == "python":
            version, *words, waits, bits = state.tolist()
            random.setstate((version, tuple(words), _number(bits) if waits else None))
        elif kind == "numpy":
            *words, position, waits, bits = state.tolist()
            np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, waits, _number(bits)))
        else:
            getattr(torch, kind).set_rng_state(state, *([int(index)] if index else []))


def states_to_json(states: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Convert states from :func:`random_states` to plain lists, for another process."""
    return {name: state.tolist() for name, state in states.items()}


def states_from_json(lists: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Convert lists from :func:`states_to_json` back to states."""
    dtypes = {"python": torch.int64, "numpy": torch.int64}
    return {name: torch.tensor(words, dtype=dtypes.get(name, torch.uint8)) for name, words in lists.items()}


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


# ------------------------------------------------------------------------------------------------- one generator


def is_generator(value: Any) -> bool:
    """Return whether ``value`` is a random number generator with a state of its own."""
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def is_global(generator: Any) -> bool:
    """Return whether ``generator`` is the global one of Python, NumPy or torch's CPU."""
    known: tuple[Any, ...] = (random._inst, np.random.mtrand._rand, torch.default_generator)
    return any(generator is other for other in known)


def state_digest(generator: Any) -> str:
    """Return 16 hexadecimal digits for the state of one generator (:data:`GENERATORS`), without drawing from it."""
    state = state_value(state_access(generator)[0]())
    return xxhash.xxh3_64_hexdigest(state if isinstance(state, bytes) else repr(state).encode())


def state_access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return the getter and setter of the state of one generator (:data:`GENERATORS`)."""
    if isinstance(generator, torch.Generator):
        return unobserved()(generator.get_state), generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return lambda: generator.get_state(legacy=False), generator.set_state
    source = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return lambda: source.state, lambda state: setattr(source, "state", state)


def state_value(value: Any) -> Any:
    """Convert a state to a form in which ``==`` compares all of it."""
    if isinstance(value, torch.Tensor):
        return ctypes.string_at(value.data_ptr(), value.nbytes)  # not .numpy(), which is an op
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return {key: state_value(item) for key, item in value.items()} if isinstance(value, dict) else value


def global_state_digests(private: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Digest the states of Python's, NumPy's and torch's global generators (initialised CUDA devices included).

    ``private`` adds further generators by name.
    """
    digests = {"python": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode())}
    numpy = sys.modules.get("numpy.random.mtrand")
    if numpy is not None:
        digests["numpy"] = state_digest(numpy._rand)
    digests["torch"] = state_digest(torch.default_generator)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states = torch.cuda.get_rng_state_all()
        digests["cuda"] = xxhash.xxh3_64_hexdigest(b"".join(bytes(state.tolist()) for state in states))
    return digests | {name: state_digest(generator) for name, generator in (private or {}).items()}
