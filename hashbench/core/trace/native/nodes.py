"""Nodes of a native trace: the C++ recorder numbers records and leaves, and knows the last writer of each storage.

Calls that Python records take their numbers from the recorder. Python sees aliases of the program's tensors; the marks
of their storages are copied from the recorder before such a call, and back after it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from hashbench.core.native.library import KNOWN, LEAVES, RECORDS, Library
from hashbench.core.trace.build import RawLeaf
from hashbench.core.trace.digest import components, local_tensor
from hashbench.core.trace.module_paths import ModulePaths, ModuleStack, NamedState
from hashbench.core.trace.native.decode import leaf_storages
from hashbench.core.trace.nodes import CallPlace, Describe, is_marked, own_mark
from hashbench.core.trace.storage_writers import LeafViews, Mark, storage_key, view_key

if TYPE_CHECKING:
    from hashbench.core.trace.native.threads import ThreadLane

_Int32 = ctypes.c_int32


class ThreadState(threading.local):
    """State of one thread of a traced program.

    Attributes:
        lane: the thread's lane; ``None`` for the main thread.
        outer: the recorder's enclosing scope of the current forwarded call, which may interrupt another.
        given: storages of that call's arguments.
        known: marks that the recorder already has.
    """

    def __init__(self) -> None:
        self.lane: ThreadLane | None = None
        self.outer: int | None = None
        self.given: Set[int] = frozenset()
        self.known: list[Mark] = []


class RecorderNodes:
    """Nodes of one trace, shared with the C++ recorder, which exists as long as this object unless :meth:`release` ends
    it; see :class:`~hashbench.core.trace.nodes.Nodes`.

    Attributes:
        recorder: address of the recorder; 0 once it is released.
        thread: state of the current thread.
    """

    def __init__(self, library: Library, recorder: int, modules: ModulePaths) -> None:
        self.library, self.recorder, self.modules = library, recorder, modules
        self.token = object()
        self.records: list[tuple[Any, ...]] = []
        self.leaves: dict[int, RawLeaf] = {}
        self.thread = ThreadState()
        self.next_record: Callable[[], int] = functools.partial(_take_number, library, recorder, self.thread)
        self._context = library.context(recorder).contents
        self.leaf_lock = threading.RLock()
        modules.use(_RecordersStack(library, recorder))

    def __del__(self) -> None:
        if self.recorder:
            self.library.delete(self.recorder)

    def release(self) -> None:
        """Delete the recorder."""
        recorder, self.recorder = self.recorder, 0
        self.library.delete(recorder)

    def detach(self) -> None:
        """Follow modules without the recorder from now on."""
        self.modules.use(ModuleStack())
        self._context = ctypes.c_uint32()

    def record_count(self) -> int:
        return int(self.library.count(self.recorder, RECORDS))

    def leaf_count(self) -> int:
        return int(self.library.count(self.recorder, LEAVES))

    @property
    def context(self) -> int:
        """Number of this thread's context."""
        lane = self.thread.lane
        return int(self._context.value) if lane is None else lane.context

    def place(self) -> CallPlace:
        lane = self.thread.lane
        mark = int(self.library.thread_mark(self.recorder))
        return CallPlace(*self.modules.contexts[self.context], "" if lane is None else lane.name, mark)

    def name(self, state: NamedState) -> None:
        with torch._C.DisableTorchFunction():  # hide attribute access from the program's own modes
            tensors = array("Q", [0 if tensor is None else tensor._cdata for tensor in state.tensors])
        self.library.name(self.recorder, tensors.buffer_info()[0], len(tensors), state.first)

    def state_of(self, tensor: torch.Tensor) -> int:
        return int(self.library.name_of(self.recorder, self.library.origin(tensor._cdata)))

    def storage_of(self, tensor: torch.Tensor) -> int:
        return int(self.library.origin(storage_key(tensor) or 0) or 0)

    def storages_read(self) -> Sequence[int]:
        return leaf_storages(self.library, self.recorder)

    # ---------------------------------------------------------------------------------------------------- leaves

    def add_leaf(self, tensor: torch.Tensor, views: LeafViews | None, *, whole: bool, describe: Describe) -> int:
        with self.leaf_lock:  # another thread may just have added it
            self.pull((tensor,))
            mark = own_mark(tensor, self.token)
            if mark is not None and not whole:
                if views is None and not isinstance(mark[2], dict):
                    self.thread.known.append(mark)
                    return mark[1]
                if isinstance(mark[2], dict):
                    views = mark[2]
                    if view_key(tensor) in views:
                        return views[view_key(tensor)]
            storages = array("Q", () if whole else self.origins(storages_of((tensor,))))
            number = self._take_leaf(storages, in_parts=views is not None)
            if not number:  # another thread just read it, in C++
                known = self._mark_of(storages[0])
                assert known is not None
                return known[1]
            try:
                self.leaves[number] = describe(number, views)
            except BaseException:  # its number is taken: content unknown
                unknown = tensor.dtype, tuple(tensor.shape), None, None
                self.leaves[number] = "other", self.modules.current, unknown, self.record_count(), None
                for storage in storages:
                    self.library.set_node(self.recorder, storage, number, 1)
                raise
            if whole:
                self.push((tensor,))
            self.thread.known += marks_of(storages_of((tensor,)))
            return number

    def append_leaf(self, leaf: RawLeaf) -> int:
        number = self._take_leaf(array("Q"), in_parts=False)
        self.leaves[number] = leaf
        return number

    def _take_leaf(self, storages: array[int], *, in_parts: bool) -> int:
        """Take the number of the next leaf, and atomically mark these storages as (parts of) it in the recorder; return
        0 if another thread just did."""
        address, count = storages.buffer_info() if storages else (0, 0)
        return int(self.library.take_leaf(self.recorder, address, count, int(in_parts)))

    # ------------------------------------------------------------------------------------------------------ marks

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Also ask the recorder: Python receives aliases of plain tensors, but conjugated views themselves."""
        return is_marked(tensor, self.token) or any(
            origin in self.thread.given or self._mark_of(origin) is not None
            for origin in self.origins(storages_of((tensor,)))
        )

    def pull(self, tensors: Iterable[torch.Tensor]) -> None:
        self.pull_marks(storages_of(tensors))

    def push(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy Python's marks to the recorder, except those it knows: another thread may have written since."""
        known = set(map(id, self.thread.known))
        for storage in storages_of(tensors):
            mark: Mark = storage._hashbench_writer  # type: ignore[attr-defined]
            owner, node, more = mark
            if owner is self.token and id(mark) not in known:
                origin = self.library.origin(storage._cdata)
                self.library.set_node(self.recorder, origin, node, int(more is not None))

    def pull_marks(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy the recorder's marks of storages to Python."""
        for storage in storages:
            mark = self._mark_of(self.library.origin(storage._cdata))
            if mark is not None:
                storage._hashbench_writer = mark  # type: ignore[attr-defined]

    def origins(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[int]:
        """Map storages of aliases to the program's own storages."""
        return (self.library.origin(storage._cdata) for storage in storages)

    def _mark_of(self, storage: int) -> Mark | None:
        node = _Int32()
        state = self.library.node(self.recorder, storage, node)
        return (self.token, node.value, None) if state == KNOWN else None


class _RecordersStack(ModuleStack):
    """Adapter to the recorder's own module stack, for the thread whose calls it records."""

    def __init__(self, library: Library, recorder: int) -> None:
        super().__init__()
        self._library, self._recorder = library, recorder
        self.enter, self.enter_by_hook = library.enter_module, library.enter_module_by_hook  # type: ignore[method-assign]
        self.leave = library.leave_module  # type: ignore[method-assign]

    @property
    def place(self) -> int:
        return int(self._library.place(self._recorder))

    def begin(self, start: int) -> None:
        self._library.contexts_from(self._recorder, start)

    def know(self, modules: Sequence[int], first: int) -> None:
        ids = array("Q", modules)
        self._library.know_modules(self._recorder, ids.buffer_info()[0], len(ids), first)

    def forget(self) -> None:
        self._library.forget_modules(self._recorder)

    def leave_all(self) -> bool:
        return bool(self._library.leave_modules(self._recorder))


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages that hold the data of these tensors, where there are any."""
    storages = []
    for tensor in tensors:
        for part in components(local_tensor(tensor)):
            try:
                storages.append(part.untyped_storage())
            except (NotImplementedError, RuntimeError):
                continue
    return storages


def marks_of(storages: Iterable[torch.UntypedStorage]) -> list[Mark]:
    """Return Python's marks of these storages."""
    return [storage._hashbench_writer for storage in storages]  # type: ignore[attr-defined]


def _take_number(library: Library, recorder: int, thread: ThreadState) -> int:
    """Take a record number for this thread's last call, which Python records."""
    number = int(library.take_record(recorder))
    outer, thread.outer = thread.outer, None
    if outer is not None:
        library.close(recorder, outer, number)
    return number
