"""Nodes of a trace: its records and leaves, their numbers, and which of them last wrote each storage.

Records count from 0, leaves from -1 down. Every storage that a recorded op wrote carries the number of that record
(``storage_writers``), so records neither refer to tensors nor keep them alive.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hashbench.core.trace.build import RawLeaf
from hashbench.core.trace.digest import components, is_distributed
from hashbench.core.trace.module_paths import ModulePaths, NamedState
from hashbench.core.trace.storage_writers import LeafViews, Mark, get_mark, storage_key

UNNAMED, UNNAMED_PARAMETER = -1, -2
"""Results of :meth:`Nodes.state_of` for tensors that no known module has."""

Describe = Callable[[int, LeafViews | None], RawLeaf]
"""Hash, name and mark the leaf of this number; the views are the known parts of a storage seen in parts."""


class CallPlace(NamedTuple):
    """Place of a call in the program.

    Attributes:
        module: path of the current module.
        iteration: number of the iteration.
        optimizing: whether an optimizer steps.
        thread: name of the program's thread; ``""`` for the main thread.
        thread_mark: bits to add to an autograd sequence number, which is per thread.
    """

    module: str
    iteration: int | None
    optimizing: bool
    thread: str = ""
    thread_mark: int = 0


class Nodes(Protocol):
    """Numbers of records and leaves, and last writers of storages.

    Attributes:
        token: identity of the trace in marks.
        records: records made in Python, each a ``RawRecord`` as a plain tuple.
        leaves: leaves made in Python, by number.
        next_record: take the number of the next record, after its call.
    """

    token: object
    records: list[tuple[Any, ...]]
    leaves: dict[int, RawLeaf]
    next_record: Callable[[], int]

    def record_count(self) -> int:
        """Return the number of records so far."""

    def leaf_count(self) -> int:
        """Return the number of leaves so far."""

    def place(self) -> CallPlace:
        """Return the place of this thread's next call."""

    def name(self, state: NamedState) -> None:
        """Remember the numbers of a model's parameters and buffers."""

    def state_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a parameter or buffer, ``UNNAMED_PARAMETER`` or ``UNNAMED``."""

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return an identity of the tensor's storage; 0 without a storage."""

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return True if this trace has marked the tensor's storage."""

    def add_leaf(self, tensor: torch.Tensor, views: LeafViews | None, *, whole: bool, describe: Describe) -> int:
        """Add a tensor that no record wrote as a leaf; return its number.

        Args:
            tensor: the tensor that is read.
            views: known parts of its storage, if that is seen in parts.
            whole: the leaf stands for the whole storage of a partly seen one.
            describe: called with the new leaf's number.
        """

    def append_leaf(self, leaf: RawLeaf) -> int:
        """Add a leaf that marks no storage; return its number."""

    def pull(self, tensors: Iterable[torch.Tensor]) -> None:
        """Update the marks of storages that Python is about to read."""

    def push(self, tensors: Iterable[torch.Tensor]) -> None:
        """Publish the marks of storages that Python has set."""

    def storages_read(self) -> Sequence[int]:
        """Return the storages of leaves in order, if they were recorded elsewhere than in Python."""


class PythonNodes:
    """Nodes of the dispatch mode: marks are attributes of storages, and lists hold everything else."""

    def __init__(self, modules: ModulePaths) -> None:
        self.token = object()
        self.records: list[tuple[Any, ...]] = []
        self.leaves: dict[int, RawLeaf] = {}
        # Autograd's threads, one per device, dispatch concurrently. Taking a number is atomic; records may be
        # appended in another order and are sorted at the end.
        self.next_record, self._leaf_lock = itertools.count().__next__, threading.RLock()
        self._modules = modules
        self._state: dict[int, int] = {}  # numbers of parameters and buffers by their id

    def record_count(self) -> int:
        return len(self.records)

    def leaf_count(self) -> int:
        return len(self.leaves)

    def place(self) -> CallPlace:
        _, iteration, optimizing = self._modules.contexts.steps[-1]
        return CallPlace(self._modules.current, iteration, optimizing)

    def name(self, state: NamedState) -> None:
        self._state.update(state.numbers())

    def state_of(self, tensor: torch.Tensor) -> int:
        return state_number(self._modules, tensor, self._state.get(id(tensor), UNNAMED))

    def storage_of(self, tensor: torch.Tensor) -> int:
        return storage_key(tensor) or 0

    def is_known(self, tensor: torch.Tensor) -> bool:
        return is_marked(tensor, self.token)

    def add_leaf(self, _: torch.Tensor, views: LeafViews | None, *, whole: bool, describe: Describe) -> int:  # noqa: ARG002
        with self._leaf_lock:
            number = -1 - len(self.leaves)
            self.leaves[number] = describe(number, views)
            return number

    def append_leaf(self, leaf: RawLeaf) -> int:
        number = -1 - len(self.leaves)
        self.leaves[number] = leaf
        return number

    def pull(self, _: Iterable[torch.Tensor]) -> None: ...

    def push(self, _: Iterable[torch.Tensor]) -> None: ...

    def storages_read(self) -> Sequence[int]:
        return ()


def is_marked(tensor: torch.Tensor, token: object) -> bool:
    """Return True if the trace ``token`` has marked the tensor's storage, or the tensor itself."""
    if is_distributed(type(tensor)):
        (tensor,) = components(tensor)
    try:
        marked: bool = tensor.untyped_storage()._hashbench_writer[0] is token  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return isinstance(tensor, torch.Tensor) and own_mark(tensor, token) is not None
    return marked


def own_mark(tensor: torch.Tensor, token: object) -> Mark | None:
    """Return the mark that the trace ``token`` has set on a tensor's storage; ``None`` if there is none."""
    mark = get_mark(tensor)
    return mark if mark is not None and mark[0] is token else None


def state_number(modules: ModulePaths, tensor: torch.Tensor, number: int) -> int:
    """Return ``number`` if the tensor still is that parameter or buffer, else as :meth:`Nodes.state_of`."""
    if number >= 0 and modules.is_state(number, tensor):
        return number
    return UNNAMED_PARAMETER if is_parameter(tensor) else UNNAMED


def is_parameter(tensor: torch.Tensor) -> bool:
    """Check ``isinstance(tensor, nn.Parameter)`` without the Python metaclass hook for plain tensors."""
    kind = type(tensor)
    if kind is torch.Tensor:
        return getattr(tensor, "_is_param", False)
    return kind is torch.nn.Parameter or isinstance(tensor, torch.nn.Parameter)
