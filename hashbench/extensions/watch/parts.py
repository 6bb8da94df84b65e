"""Read the parts of a step from live objects: batch, generators, loss, gradients, parameters, optimizer state.

Readings hold raw digests; :func:`content` turns them into what a line of the file has. On accelerators that waits for
the device, so the recorder does it a step later.
"""

from __future__ import annotations

import _random
import ctypes
import math
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import _len_torch_dispatch_stack  # type: ignore[attr-defined]

from hashbench.core.devices.ledger import Ledger
from hashbench.core.errors import named_line
from hashbench.core.native.library import unrecorded
from hashbench.core.records import TensorDigest
from hashbench.core.run.leaves import LeftOut, leaves
from hashbench.core.run.rng import state_digest
from hashbench.core.trace.digest import RawDigest, python_digest, raw_digest, readable, untraced
from hashbench.extensions.watch.samples import Samples, samples_of
from hashbench.extensions.watch.tensors import ModelTensors, NamedTensors

_ABSENT = "none"
"""Stands for a gradient that is ``None``."""

_GONE = "absent"
"""Stands for a parameter or buffer that the model held before."""

_UNREAD = "not read"
"""Stands for a tensor of a batch that could not be read; what, and why, is said beside it."""

_PLAIN = (bool, int, float, complex, str, type(None))
_FIXED = frozenset(_PLAIN)

_NO_OPTIONS = ("lr", "params")

_NESTING = 8
"""Levels of lists and dicts that are walked without looking for a container in itself."""

_BITS = 10_000
"""Size of integers that Python does not write as decimal digits (more than 4,300 of them)."""

_SHOWN = 16
"""Longest list of an option that is written as text."""


class _Quiet:
    """As :func:`~hashbench.core.trace.digest.untraced` where no dispatch mode is active, in a sixth of the time."""

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

    def digests(self, failed: Callable[[str, BaseException], None]) -> dict[str, str]:
        """Return the digests by name; draws nothing. Tell of generators that cannot be read."""
        found = {"torch": state_digest(torch.default_generator)}
        if torch.cuda.is_initialized():
            found |= {
                f"cuda:{index}": state_digest(generator)
                for index, generator in enumerate(torch.cuda.default_generators)
            }
        found["python"] = self._digest("python", random._inst, _memory_of_python(random._inst))
        numpy: Any = sys.modules.get("numpy.random.mtrand")
        if numpy is not None:
            found["numpy"] = self._digest("numpy", numpy._rand, _memory_of(numpy._rand._bit_generator))
        for name, generator in self._private.items():
            try:
                found[name] = state_digest(generator)
            except Exception as error:
                failed(f"generator {name}", error)
        return found

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


# ------------------------------------------------------------------------------------------------------ one reading


class Reader:
    """Read tensors and values for one line of the file. What cannot be read is left out, and noted.

    Attributes:
        ledger: of digests on devices.
        unread: what could not be read -> why, since :meth:`taken` was called last.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.unread: dict[str, str] = {}

    def taken(self) -> dict[str, str]:
        """Return what could not be read, once."""
        unread, self.unread = self.unread, {}
        return unread

    def failed(self, what: str, error: BaseException | str) -> None:
        """Note that something could not be read."""
        self.unread[what] = error if isinstance(error, str) else said_by(error)

    def tensor(self, tensor: torch.Tensor, part: str, name: str) -> RawDigest | None:
        """Read a tensor; ``None`` where that raises, as for one whose memory is gone."""
        try:
            return raw_digest(tensor, self.ledger)
        except Exception as error:
            self.failed(f"{part} {name}", error)
            return None

    def named(self, part: str, of: NamedTensors, numbers: Iterable[int]) -> dict[str, Any]:
        """Read parameters or buffers by number; one that the model does not hold any more is ``absent``."""
        found = ((number, of.tensors[number]) for number in numbers)
        return {
            str(number): _GONE if tensor is None else self.tensor(tensor, part, of.names[number])
            for number, tensor in found
        }

    def gradients(self, of: NamedTensors, numbers: Iterable[int]) -> dict[str, Any]:
        """Read gradients by the number of their parameters."""
        found: dict[str, Any] = {}
        for number in numbers:
            tensor = of.tensors[number]
            try:
                grad = None if tensor is None else tensor.grad
            except RuntimeError as error:
                self.failed(f"gradient {of.names[number]}", error)
                continue
            found[str(number)] = _ABSENT if grad is None else self.tensor(grad, "gradient", of.names[number])
        return found

    def states(
        self, of: NamedTensors, numbers: Iterable[int], owner: Callable[[int], torch.optim.Optimizer | None]
    ) -> dict[str, dict[str, Any]]:
        """Read the state that optimizers keep for parameters: key -> number of the parameter -> digest."""
        found: dict[str, dict[str, Any]] = {}
        for number in numbers:
            tensor, optimizer = of.tensors[number], owner(number)
            if tensor is None or optimizer is None:
                continue
            try:
                kept = [*optimizer.state.get(tensor, {}).items()]
            except Exception as error:
                self.failed(f"optimizer state of {of.names[number]}", error)
                continue
            for key, value in kept:
                what = f"optimizer state {key!s:.100} of"
                read = (
                    self.tensor(value, what, of.names[number])
                    if isinstance(value, torch.Tensor)
                    else self.value(value, f"{what} {of.names[number]}")
                )
                found.setdefault(str(key), {})[str(number)] = read
        return found

    def whole_state(
        self, tensors: ModelTensors, owner: Callable[[int], torch.optim.Optimizer | None]
    ) -> dict[str, dict[str, Any]]:
        """Read all parameters and buffers, and the state of optimizers, as they are before a step."""
        parameters, buffers = tensors.parameters, tensors.buffers
        return {
            "parameter": self.named("parameter", parameters, range(len(parameters.names))),
            "buffer": self.named("buffer", buffers, range(len(buffers.names))),
            "state": self.states(parameters, range(len(parameters.names)), owner),
        }

    def batch(self, value: Any) -> tuple[Reading, Samples]:
        """Read the leaves of a batch, by path, and its samples."""
        active = torch._C._functorch.peek_interpreter_stack() is not None
        with torch._C._DisableFuncTorch() if active else nullcontext():
            found = [*_leaves(value, "batch", _NESTING)]
            tensors = [_inside(leaf) for _, leaf in found if isinstance(leaf, torch.Tensor)]
            return Reading([(path, self._leaf(leaf, path)) for path, leaf in found]), samples_of(tensors)

    def _leaf(self, leaf: Any, path: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.tensor(_inside(leaf), "", path) or _UNREAD
        if isinstance(leaf, LeftOut):
            self.failed(leaf.path, leaf.why)
            return str(leaf)
        try:
            return python_digest(leaf)
        except ValueError:  # an integer of more than 4,300 digits
            return TensorDigest(type(leaf).__name__, (), (), hex(leaf) if isinstance(leaf, int) else _UNREAD)

    def loss(self, roots: Sequence[torch.Tensor]) -> tuple[Reading, torch.Tensor | None]:
        """Read the roots of a backward pass: their digests, and a copy of the value if it is one number."""
        single = roots[0] if len(roots) == 1 and roots[0].numel() == 1 else None
        read = [(str(number), self.tensor(_inside(root), "loss", str(number))) for number, root in enumerate(roots)]
        return Reading([(name, raw or _UNREAD) for name, raw in read]), None if single is None else _copy(single)

    def value(self, value: Any, what: str) -> Any:
        """Read an option, or a state that is no tensor: its text, or the digest of its parts."""
        if isinstance(value, _PLAIN) and not isinstance(value, int):
            return repr(value)
        if isinstance(value, int):
            return hex(value) if value.bit_length() > _BITS else repr(value)
        if type(value) in (list, tuple) and len(value) <= _SHOWN and all(isinstance(each, _PLAIN) for each in value):
            return f"({', '.join(self.value(each, what) for each in value)})"
        read = [(path, self._leaf(leaf, path)) for path, leaf in _leaves(value, what, _NESTING)]
        return Reading(read)

    def rates(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the learning rate of each group; of one in a tensor its digest."""
        return [self._option(group["lr"], "learning rate") for group in optimizer.param_groups if "lr" in group]

    def options(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        """Return the options of all groups but parameters and learning rates as text, by name (``momentum.0``)."""
        return {
            f"{name}.{number}": self._option(value, f"option {name!s:.100}")
            for number, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name not in _NO_OPTIONS
        }

    def _option(self, value: Any, what: str) -> str:
        """Return a value as text; where it is a tensor, or others, a digest of them."""
        if isinstance(value, torch.Tensor):
            raw = self.tensor(value, what, "")
            return _UNREAD if raw is None else readable(raw).value
        read = self.value(value, what)
        return read.digest() if isinstance(read, Reading) else str(read)

    def scaler(self, of: Any) -> dict[str, str]:
        """Return the state of a ``GradScaler`` as text, which waits for its device."""
        return {str(name): self._option(value, f"scaler {name!s:.100}") for name, value in of.state_dict().items()}


def fixed_options(optimizer: torch.optim.Optimizer) -> list[Any] | None:
    """Return the values of all options, by which to see whether any was set since; ``None`` where one may be changed in
    place."""
    values = [value for group in optimizer.param_groups for name, value in group.items() if name not in _NO_OPTIONS]
    return values if all(map(_is_fixed, values)) else None


def are_same(values: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    """Return True if both are known, and hold the same objects."""
    if values is None or others is None or len(values) != len(others):
        return False
    return all(map(operator.is_, values, others))


def _is_fixed(value: Any) -> bool:
    return type(value) in _FIXED or (type(value) is tuple and all(type(each) in _FIXED for each in value))


def said_by(error: BaseException) -> str:
    """Return what an exception says in one line, even if that raises."""
    try:
        return named_line(error, limit=500)
    except Exception:
        return f"{type(error).__name__}: its text cannot be made"


def _leaves(value: Any, name: str, nesting: int) -> Iterator[tuple[str, Any]]:
    """Yield what :func:`~hashbench.core.run.leaves.leaves` does, faster for the usual nesting."""
    if type(value) is torch.Tensor:
        yield name, value
    elif nesting and type(value) in (tuple, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}", nesting - 1)
    elif nesting and type(value) is dict and value and all(type(key) is str for key in value):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}", nesting - 1)
    else:
        yield from leaves(value, name)


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers of ``torch.func``: of a batch under ``vmap`` the whole batch."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _copy(single: torch.Tensor) -> torch.Tensor | None:
    try:
        return _inside(single).detach().clone()
    except Exception:
        return None


# -------------------------------------------------------------------------------------------------- what a line has


def content(read: Any) -> Any:
    """Return a reading as JSON has it: raw digests become hexadecimal digits."""
    match read:
        case dict():
            return {key: content(value) for key, value in read.items() if value is not None}
        case Reading() | Samples():
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
        return xxhash.xxh3_64_hexdigest("\n".join(words).encode(errors="surrogatepass"))


def number(value: torch.Tensor | None) -> float | None:
    """Return a value of a loss; ``None`` where it is not finite."""
    if value is None or value.is_complex():
        return None
    plain = float(value)
    return plain if math.isfinite(plain) else None
