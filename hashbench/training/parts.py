"""Read the parts of a step from live objects: batch, generators, loss, gradients, parameters, optimizer state.

Readings hold raw digests; :func:`content` turns them into what a line of the file has. On accelerators that waits for
the device, so the recorder does it a step later.
"""

from __future__ import annotations

import _random
import ctypes
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

from hashbench.devices.ledger import Ledger
from hashbench.native.library import unrecorded
from hashbench.run.leaves import LeftOut, leaves
from hashbench.run.rng import state_digest
from hashbench.trace.digest import RawDigest, python_digest, raw_digest, readable, untraced

_WRAPPERS = ("_orig_mod", "module")
"""Attributes under which ``torch.compile`` and data parallel wrappers hold the module that they wrap."""

_ABSENT = "none"
"""Stands for a gradient that is ``None``."""

_PLAIN = (bool, int, float, str, type(None))


class _Quiet:
    """As :func:`~hashbench.trace.digest.untraced` where no dispatch mode is active, in a sixth of the time."""

    def __init__(self) -> None:
        self._contexts = unrecorded(), torch.no_grad()

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def quiet() -> AbstractContextManager[None]:
    """Hide ops in this block from dispatch modes, native traces and autograd."""
    return untraced() if _len_torch_dispatch_stack() else _Quiet()


class WatchedGenerators:
    """Digests of the global generators of Python, NumPy and torch, and of private ones.

    Python's and NumPy's are digested anew only when they were drawn from: to read their states takes 0.1 ms, to look at
    their memory next to nothing.
    """

    def __init__(self, private: Mapping[str, Any]) -> None:
        self._private = private
        self._seen: dict[str, tuple[Any, str]] = {}

    def digests(self) -> dict[str, str]:
        """Return the digests by name; draws nothing."""
        found = {"torch": state_digest(torch.default_generator)}
        if torch.cuda.is_initialized():
            found |= {f"cuda:{index}": state_digest(one) for index, one in enumerate(torch.cuda.default_generators)}
        found["python"] = self._digest("python", random._inst, _memory_of_python(random._inst))
        numpy: Any = sys.modules.get("numpy.random.mtrand")
        if numpy is not None:
            found["numpy"] = self._digest("numpy", numpy._rand, _memory_of(numpy._rand._bit_generator))
        return found | {name: state_digest(generator) for name, generator in self._private.items()}

    def _digest(self, name: str, generator: Any, state: Any) -> str:
        """Return the digest of a generator, again where its ``state`` is what it was; ``None`` is never."""
        last = self._seen.get(name)
        if state is not None and last is not None and last[0] == state:
            return last[1]
        digest = state_digest(generator)
        self._seen[name] = state, digest
        return digest


_MERSENNE_TWISTER = 625 * 4
"""Bytes of the state of an MT19937 in Python's and in NumPy's structs: 624 words and the position."""


def _memory_of_python(generator: random.Random) -> bytes | None:
    """Return the state of Python's generator as it lies in memory; ``None`` for other Pythons than CPython."""
    size, head = _random.Random.__basicsize__, object.__basicsize__
    if sys.implementation.name != "cpython" or size < head + _MERSENNE_TWISTER:
        return None
    return ctypes.string_at(id(generator) + head, _MERSENNE_TWISTER)


def _memory_of(bit_generator: Any) -> bytes | None:
    """Return the state of NumPy's default kind of generator as it lies in memory; ``None`` for other kinds."""
    if type(bit_generator).__name__ != "MT19937":
        return None
    return ctypes.string_at(bit_generator.ctypes.state_address, _MERSENNE_TWISTER)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside ``torch.compile`` and data parallel wrappers, whose names do not depend on these."""
    while True:
        inner = next((model._modules[name] for name in _WRAPPERS if list(model._modules) == [name]), None)
        if inner is None or next(model.parameters(recurse=False), None) is not None:
            return model
        model = inner


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Parameters and buffers of the watched models, by index.

    Attributes:
        parameters, buffers: names and tensors.
        index: index of a parameter by its ``id``.
    """

    parameters: Sequence[tuple[str, torch.Tensor]]
    buffers: Sequence[tuple[str, torch.Tensor]]
    index: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, models: Mapping[str, torch.nn.Module]) -> ModelTensors:
        """List the parameters and buffers of models; a name begins with its model's, if that is not empty."""
        named = {name: unwrapped(model) for name, model in models.items()}
        parameters = [found for name, model in named.items() for found in model.named_parameters(prefix=name)]
        buffers = [found for name, model in named.items() for found in model.named_buffers(prefix=name)]
        return cls(parameters, buffers, {id(tensor): index for index, (_, tensor) in enumerate(parameters)})

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> list[list[int]]:
        """Return the indices of the parameters in each group of an optimizer, in its order; others are left out."""
        groups = (group["params"] for group in optimizer.param_groups)
        return [[self.index[id(tensor)] for tensor in group if id(tensor) in self.index] for group in groups]


# ------------------------------------------------------------------------------------------------------ one reading


def batch(value: Any, ledger: Ledger) -> list[tuple[str, Any]]:
    """Read the leaves of a batch, by path."""
    return [(path, _leaf(leaf, ledger)) for path, leaf in _leaves(value, "batch")]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what :func:`~hashbench.run.leaves.leaves` does, faster for the usual nesting."""
    if type(value) is torch.Tensor:
        yield name, value
    elif type(value) in (tuple, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    elif type(value) is dict and value and all(type(key) is str for key in value):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    else:
        yield from leaves(value, name)


def _leaf(leaf: Any, ledger: Ledger) -> Any:
    if isinstance(leaf, torch.Tensor):
        return raw_digest(leaf, ledger)
    return str(leaf) if isinstance(leaf, LeftOut) else python_digest(leaf)


def loss(roots: Sequence[torch.Tensor], ledger: Ledger) -> tuple[list[tuple[str, RawDigest]], torch.Tensor | None]:
    """Read the roots of a backward pass: their digests, and a copy of the value if it is one number."""
    single = roots[0] if len(roots) == 1 and roots[0].numel() == 1 else None
    read = [(str(number), raw_digest(root, ledger)) for number, root in enumerate(roots)]
    return read, None if single is None else single.detach().clone()


def gradients(tensors: ModelTensors, indices: Sequence[int], ledger: Ledger) -> dict[str, Any]:
    """Read gradients by the index of their parameters."""
    found = ((index, tensors.parameters[index][1].grad) for index in indices)
    return {str(index): _ABSENT if grad is None else raw_digest(grad, ledger) for index, grad in found}


def values(named: Sequence[tuple[str, torch.Tensor]], indices: Sequence[int], ledger: Ledger) -> dict[str, Any]:
    """Read parameters or buffers by index."""
    return {str(index): raw_digest(named[index][1], ledger) for index in indices}


def state(
    tensors: ModelTensors, indices: Sequence[int], optimizers: Sequence[torch.optim.Optimizer], ledger: Ledger
) -> dict[str, dict[str, Any]]:
    """Read the state that optimizers keep for parameters: key -> index -> digest."""
    found: dict[str, dict[str, Any]] = {}
    for index in indices:
        tensor = tensors.parameters[index][1]
        for optimizer in optimizers:
            for key, value in optimizer.state.get(tensor, {}).items():
                read = raw_digest(value, ledger) if isinstance(value, torch.Tensor) else _plain(value)
                found.setdefault(str(key), {})[str(index)] = read
    return found


def whole_state(
    tensors: ModelTensors, optimizers: Sequence[torch.optim.Optimizer], ledger: Ledger
) -> dict[str, dict[str, Any]]:
    """Read all parameters and buffers, and the state of optimizers, as they are before a step."""
    whole = range(len(tensors.parameters))
    return {
        "parameter": values(tensors.parameters, whole, ledger),
        "buffer": values(tensors.buffers, range(len(tensors.buffers)), ledger),
        "state": state(tensors, whole, optimizers, ledger),
    }


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def rates(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the learning rate of each group; of one in a tensor its digest."""
    return [_option(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def option_values(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """Return the options of all groups but parameters and learning rates, by name (``momentum.0``)."""
    return [
        (f"{name}.{number}", value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("lr", "params")
    ]


def options(values: Sequence[tuple[str, Any]]) -> dict[str, str]:
    """Return options as text by name."""
    return {name: _option(value) for name, value in values}


def _option(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_option, value))})"
    return readable(raw_digest(value)).value if isinstance(value, torch.Tensor) else _plain(value)


def scaler(of: Any) -> dict[str, str]:
    """Return the state of a ``GradScaler`` as text, which waits for its device."""
    return {str(name): _plain(value) for name, value in of.state_dict().items()}


# -------------------------------------------------------------------------------------------------- what a line has


def content(read: Any) -> Any:
    """Return a reading as JSON has it: raw digests become hexadecimal digits."""
    match read:
        case dict():
            return {key: content(value) for key, value in read.items()}
        case Reading():
            return read.digest()
        case list():
            return [content(value) for value in read]
        case tuple():
            return readable(read).value
    return read


@dataclass(frozen=True, slots=True)
class Reading:
    """Several raw digests that the file holds as one."""

    parts: Sequence[tuple[str, Any]]

    def digest(self) -> str:
        """Return 16 hexadecimal digits over names, dtypes, shapes and contents."""
        words = (f"{name}={read if isinstance(read, str) else readable(read).word()}" for name, read in self.parts)
        return xxhash.xxh3_64_hexdigest("\n".join(words).encode())


def number(value: torch.Tensor | None) -> float | None:
    """Return a value of a loss; ``None`` where it is not finite."""
    if value is None or value.is_complex():
        return None
    plain = float(value)
    return plain if math.isfinite(plain) else None


def device_of(tensors: ModelTensors) -> str:
    """Return the type of the device of the parameters; several are joined."""
    return "+".join(sorted({tensor.device.type for _, tensor in (*tensors.parameters, *tensors.buffers)})) or "cpu"


def sizes(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int]]:
    """Yield names and sizes in bytes."""
    for name, tensor in tensors:
        yield name, tensor.numel() * tensor.element_size()
