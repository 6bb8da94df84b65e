"""Call a kernel on copies of its inputs, and see what it returns and what it does to memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hashbench.core.diagnose.replay.controls.memory import poisoned_memory
from hashbench.core.run.outputs import logical_value
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.trace.arguments import leaves, mapped, named_tensors, tensors_in
from hashbench.core.trace.storage_writers import storage_key
from hashbench.extensions.kernels.inputs import KernelInputs

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Called:
    """What a call left.

    Attributes:
        results: copies of the tensors that it returned.
        names: of the results: ``output``, ``output.1``.
        returned: those tensors themselves.
        given: the inputs that it got, as it left them.
        written: numbers of the inputs that it wrote.
        aliased: numbers of the inputs in whose memory a result lies.
        error: that it raised; the other fields are then empty.
        seconds: how long it took.
    """

    results: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    returned: tuple[torch.Tensor, ...]
    given: KernelInputs
    written: frozenset[int] = frozenset()
    aliased: frozenset[int] = frozenset()
    error: Exception | None = None
    seconds: float = 0.0

    def same_bits(self, other: Called) -> bool:
        """Return whether two calls left equal results, bit by bit."""
        return len(self.results) == len(other.results) and all(map(equal_bits, self.results, other.results))

    def overwritten(self) -> tuple[str, ...]:
        """Return the names of results that were written after they had been returned."""
        pairs = zip(self.names, self.results, self.returned, strict=True)
        return tuple(name for name, copy, tensor in pairs if not equal_bits(copy, tensor))


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have equal shape, dtype and bits; strides may differ."""
    if left.shape != right.shape or left.dtype is not right.dtype or left.device != right.device:
        return False
    return logical_value(left) == logical_value(right)


class Caller:
    """Calls one function, each time on copies of the inputs and from the same random state.

    A function that raises on tensors, and returns arrays of NumPy where it is given arrays, is given arrays from then
    on.

    Args:
        function: any callable.
        seed: of the random state that each call begins with.
        gradients: the function takes gradients itself.
        names: returns names for that many results; ``None``: they are called by their place.
        tensors: it gets arrays as tensors.

    Attributes:
        takes_arrays: it is given arrays; ``None``: not known yet.
    """

    def __init__(
        self,
        function: Function,
        *,
        seed: int,
        gradients: bool = False,
        names: Callable[[int], tuple[str, ...]] | None = None,
        tensors: bool = False,
    ) -> None:
        self._function, self._seed, self._gradients, self._names = function, seed, gradients, names
        self._arrays = not tensors
        self.takes_arrays: bool | None = False if tensors else None

    def __call__(self, inputs: KernelInputs, *, poison: int | None = None) -> Called:
        """Call the function on copies of the inputs.

        Args:
            inputs: arguments.
            poison: fresh memory holds this byte.
        """
        called, arrays = self._call(inputs, poison)
        if called.error is None or self.takes_arrays is not None:
            self.takes_arrays = bool(self.takes_arrays)
            return called
        everything = inputs.all_arrays()
        if everything is not None:
            again, arrays = self._call(everything, poison)
            if again.error is None and arrays:
                self.takes_arrays = True
                return again
        return called

    def _call(self, inputs: KernelInputs, poison: int | None) -> tuple[Called, bool]:
        """Return what a call left, and whether it returned arrays."""
        given = ((self.takes_arrays and inputs.all_arrays()) or inputs).copied()
        before = {number: logical_value(tensor) for number, tensor in given.tensors()}
        args, kwargs = given.arguments(arrays=self._arrays)
        reset_rng_state(self._seed)
        begin = time.perf_counter()
        try:
            with _filled(poison, given), nullcontext() if self._gradients else torch.no_grad():
                value = self._function(*args, **kwargs)
            named = list(named_tensors(mapped(value, _tensor)))
        except Exception as error:
            return Called((), (), (), given, error=error), False
        took = time.perf_counter() - begin
        returned = tuple(tensor.detach() for _, tensor in named)
        paths = tuple(f"output.{path}" if path else "output" for path, _ in named)
        names = self._names(len(named)) if self._names else paths
        memory = {storage_key(tensor) for tensor in returned} - {None}
        addresses = {tensor.data_ptr() for tensor in returned if tensor.numel()} if given.arrays else set()
        called = Called(
            tuple(tensor.clone() for tensor in returned),
            names,
            returned,
            given,
            frozenset(number for number, tensor in given.tensors() if logical_value(tensor) != before[number]),
            frozenset(
                number
                for number, tensor in given.tensors()
                if storage_key(tensor) in memory or tensor.data_ptr() in addresses
            ),
            seconds=took,
        )
        return called, any(isinstance(leaf, np.ndarray) for leaf in leaves(value))


def _filled(poison: int | None, inputs: KernelInputs) -> AbstractContextManager[None]:
    if poison is None:
        return nullcontext()
    return poisoned_memory(poison, device=inputs.device())


def _tensor(leaf: Any) -> Any:
    """Return an array as a tensor in its memory, where torch can have it there."""
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    plain = isinstance(leaf, np.ndarray) and leaf.flags.writeable and min(leaf.strides, default=0) >= 0
    return torch.from_numpy(leaf if plain else np.array(leaf))


def leaving(function: Function, written: Sequence[int], *, returns: bool) -> Function:
    """Return a function that also returns what a call leaves in some of its inputs.

    Args:
        function: writes inputs.
        written: numbers of their leaves.
        returns: what it returns counts, too.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        value = function(*args, **kwargs)
        given: list[Any] = []
        mapped((args, kwargs), given.append)
        returned = tensors_in(mapped(value, _tensor)) if returns else ()
        return (*returned, *(given[number] for number in written))

    return call
