"""Python part of the native tracer: answer the recorder during a trace, and build the trace.

The recorder handles calls on dense CPU tensors. All other calls, and all calls under an observer, are forwarded one by
one and recorded as under the dispatch mode, of which this is a subclass, but no mode is active. Both sides share the
numbers of records and leaves, and the last writer of each storage.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import xxhash

from hashbench.errors import HashbenchError
from hashbench.native.library import CALLS, KNOWN, LANES, LEAVES, RECORDS, Library, is_recorded, unrecorded
from hashbench.records import TensorDigest, Trace
from hashbench.trace import arguments
from hashbench.trace.build import RawRecord, RawResult, RecordIdentity, build_trace, without_gaps
from hashbench.trace.callbacks import TraceOptions
from hashbench.trace.digest import BY_DTYPE, RawDigest, components, is_waiting, local_tensor, raw_digest, untraced
from hashbench.trace.lanes import Recorded, callers_of, in_schedule_independent_order
from hashbench.trace.mode import TracingMode, _current_autograd_node, _get_sequence_nr, call_with_callback, is_parameter
from hashbench.trace.module_paths import ModuleStack, NamedState
from hashbench.trace.native.decode import Kept, content_of, leaf_storages
from hashbench.trace.native.ops import Ops, plan_of
from hashbench.trace.op_schema import OpPlan
from hashbench.trace.storage_writers import LeafViews, Mark, get_mark, set_mark, storage_key, view_key
from hashbench.trace.threads import Starts

_Int32 = ctypes.c_int32


class _Calls(threading.local):
    """Per-thread state: current lane and enclosing call scope.

    Attributes:
        lane: the thread's lane; ``None`` for the main thread.
        outer: the recorder's enclosing scope of the current forwarded call, which may interrupt another.
        given: storages of that call's arguments.
        known: marks that the recorder already has.
    """

    def __init__(self) -> None:
        self.lane: _Lane | None = None
        self.outer: int | None = None
        self.given: Set[int] = frozenset()
        self.known: list[Mark] = []


class _Lane:
    """Thread, or task of a pool, that a traced program starts. ``name`` is its part of record ids."""

    def __init__(self, tracer: NativeTracer, number: int, name: str, context: int) -> None:
        self.tracer, self.number, self.name, self.context = tracer, number, name, context
        self.started: dict[int, int] = defaultdict(int)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self.tracer.entered(self):
            return function(*args, **kwargs)


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


class NativeTracer(TracingMode):
    """Tracer that records as :class:`~hashbench.trace.mode.TracingMode` does, but by a fallback kernel on its own
    dispatch
    key: traced code runs exactly as untraced."""

    def __init__(self, options: TraceOptions, library: Library, ops: Ops) -> None:
        super().__init__(options)
        self._library, self._ops = library, ops
        observed = self._observer.wanted or self._observer.callback is not None or self._ledger.everywhere
        self._mixed = not observed
        odd = sum(1 << number for number, dtype in library.dtypes.items() if dtype in BY_DTYPE) if BY_DTYPE else 0
        self._recorder = library.new(1, int(observed), int(self._records_nothing), odd)
        self._contexts = self._modules.contexts
        self._context = library.context(self._recorder).contents
        self._modules.use(_RecordersStack(library, self._recorder))
        self._odd_digests: list[RawDigest] = []
        self._starts = Starts()
        self._calls = _Calls()
        self._entered, self._entering = 0, threading.Lock()
        self._started: dict[int, int] = defaultdict(int)
        self._names_of_lanes: dict[int, str] = {}
        ours = library, self._recorder, self._calls
        self._next_number, self._make = functools.partial(_take_number, *ours), functools.partial(_make, *ours)
        self.changed()

    def __del__(self) -> None:
        if getattr(self, "_recorder", 0):
            self._library.delete(self._recorder)

    def __enter__(self) -> NativeTracer:
        if not self._library.begin(self._recorder):
            raise HashbenchError(
                "cannot enter a native trace while another thread is in one",
                consequence="the recorder sees all threads of a process",
                tip='Exit that one first, or use HashDebugTrace(tracer="python") for both.',
            )
        try:
            self._begin()
            self._library.listener = self
            self._resume()
        except BaseException:
            self._library.end(self._recorder)
            self._library.listener = None
            self._suspend()
            self._stop()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self._suspend()
        failed = self._library.end(self._recorder)
        self._library.listener = None
        if failed >= 0:
            self.failed_op = self._ops.by_number[failed].plan.name
        self._end(*exception)
        errors, self._library.errors = self._library.errors, []
        if errors and exception[0] is None:
            raise errors[-1]

    def finish(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """Return the trace, and notes by record number; release the raw records."""
        built = super().finish()
        self._modules.use(ModuleStack())
        self._context = ctypes.c_uint32()
        with self._entering:
            # A thread (even this one) may be inside a call: it keeps this object, and the recorder, alive.
            if not self._entered and not self._library.count(self._recorder, CALLS):
                recorder, self._recorder = self._recorder, 0
                self._library.delete(recorder)
        return built

    def _suspend(self) -> None:
        super()._suspend()
        self._starts.remove()
        self._library.thread(0)

    def _resume(self) -> None:
        super()._resume()
        self._starts.install(self._begin_lane)
        self._library.thread(1)

    # ------------------------------------------------------------------------------------- threads of the program's own

    def _begin_lane(self) -> _Lane | None:
        """Return a lane for what this thread starts; ``None`` if its own calls are not recorded."""
        if self._library.listener is not self or not is_recorded():
            return None
        number = int(self._library.lane(self._recorder))
        if number < 0:
            return None
        parent = self._calls.lane
        context = self._context.value if parent is None else parent.context
        started = self._started if parent is None else parent.started
        name = f"{'t' if parent is None else parent.name}{started[context]}."
        started[context] += 1
        lane = _Lane(self, number, name, context)
        self._names_of_lanes[number] = name
        return lane

    @contextmanager
    def entered(self, lane: _Lane) -> Iterator[None]:
        """Record this thread's calls in a lane, unless the trace is over."""
        with self._entering:
            active = self._library.listener is self
            self._entered += active
        if not active:
            yield
            return
        before, outer = self._calls.lane, self._calls.outer
        self._calls.lane, self._calls.outer = lane, None
        state = self._library.enter(self._recorder, lane.number)
        try:
            yield
        finally:
            self._library.leave(state)
            self._calls.lane, self._calls.outer = before, outer
            with self._entering:
                self._entered -= 1

    def _identity(self, plan: OpPlan) -> RecordIdentity:
        node, lane = _current_autograd_node(), self._calls.lane
        module, iteration, optimizing = self._contexts[self._context.value if lane is None else lane.context]
        sequence = _get_sequence_nr() - 1 if node is None else node._sequence_nr()
        return self._observer.ids.add_record(
            plan.name,
            phase="backward" if node is not None else "optimizer" if optimizing else "forward",
            iteration=iteration,
            module=module,
            sequence=sequence | self._library.thread_mark(self._recorder),
            thread="" if lane is None else lane.name,
        )

    def changed(self) -> None:
        self._modules.begin(self.iteration)

    def register_model(self, model: torch.nn.Module) -> NamedState:
        self.named(found := super().register_model(model))
        return found

    def named(self, state: NamedState) -> None:
        with torch._C.DisableTorchFunction():  # hide attribute access from the program's own modes
            tensors = array("Q", [0 if tensor is None else tensor._cdata for tensor in state.tensors])
        self._library.name(self._recorder, tensors.buffer_info()[0], len(tensors), state.first)

    # ------------------------------------------------------------------------------------------ what the recorder asks

    def name_of_leaf(self, tensor: torch.Tensor, number: int) -> int:
        """Return ``number`` if the tensor still is that parameter or buffer, -2 for another parameter, -1 otherwise."""
        if number >= 0 and self._modules.is_state(number, tensor):
            return number
        return -2 if is_parameter(tensor) else -1

    def digest_odd(self, tensor: torch.Tensor, number: int, *, blank: bool) -> int:
        """Hash and mark a tensor written by record ``number`` that the recorder cannot hash."""
        with unrecorded():
            set_mark(tensor, (self._token, number, None))
            self._push_marks(_storages((tensor,)))
            digest = raw_digest(tensor, self._ledger)
        self._odd_digests.append((*digest[:3], None) if blank else digest)
        return len(self._odd_digests) - 1

    def handle(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call forwarded by the recorder, and record it unless its op is excluded (as are ops called by the
        backward of compiled code)."""
        plan = self._plans.get(id(func)) or self._plan(func)
        if not plan.traced:
            return self._library.make()
        calls, observer = self._calls, self._observer
        interrupted = calls.outer, calls.given, calls.known, observer.last
        try:
            calls.outer = None
            if self._records_nothing:
                return self._call_unrecorded(plan, args, kwargs)
            given = arguments.tensors_in([*args, *kwargs.values()])
            storages = _storages(given)
            self._pull_marks(storages)
            calls.given, calls.known = set(self._origins(storages)), _marks_of(storages)
            output = self.__torch_dispatch__(func, (), args, kwargs)
            self._push_marks(_storages((*given, *arguments.tensors_in(output))))
            return output
        finally:
            self._close()  # a callback may raise after the call
            calls.outer, calls.given, calls.known, observer.last = interrupted

    def _plan(self, func: Any) -> OpPlan:
        plan = plan_of(func)
        make = functools.partial(self._make, func.namespace != "aten")
        self._plans[id(func)] = plan = replace(plan, call=make)
        if self._observer.callback is not None and plan.traced:
            call = functools.partial(call_with_callback, weakref.ref(self), func, plan)
            self._plans[id(func)] = replace(plan, call=call)
        return self._plans[id(func)]

    def _close(self) -> None:
        """Close this thread's last call scope if no record has done so."""
        outer, self._calls.outer = self._calls.outer, None
        if outer is not None:
            self._library.close(self._recorder, outer, -1)

    def _pull_marks(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy the recorder's marks of storages to Python."""
        for storage in storages:
            mark = self._mark_of(self._library.origin(storage._cdata))
            if mark is not None:
                storage._hashbench_writer = mark  # type: ignore[attr-defined]

    def _mark_of(self, storage: int) -> Mark | None:
        node = _Int32()
        state = self._library.node(self._recorder, storage, node)
        return (self._token, node.value, None) if state == KNOWN else None

    def _is_marked(self, tensor: torch.Tensor) -> bool:
        """Also ask the recorder: Python receives aliases of plain tensors, but conjugated views themselves."""
        return super()._is_marked(tensor) or any(
            origin in self._calls.given or self._mark_of(origin) is not None
            for origin in self._origins(_storages((tensor,)))
        )

    def _origins(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[int]:
        """Map storages of aliases to the program's own storages."""
        return (self._library.origin(storage._cdata) for storage in storages)

    def _push_marks(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy Python's marks of storages to the recorder, except those it knows: another thread may have written
        since."""
        known = set(map(id, self._calls.known))
        for storage in storages:
            mark: Mark = storage._hashbench_writer  # type: ignore[attr-defined]
            owner, node, more = mark
            if owner is self._token and id(mark) not in known:
                origin = self._library.origin(storage._cdata)
                self._library.set_node(self._recorder, origin, node, int(more is not None))

    def _state_name(self, tensor: torch.Tensor) -> tuple[str, str]:
        number = self._library.name_of(self._recorder, self._library.origin(tensor._cdata))
        if number < 0:
            return "parameter" if number == -2 else "", self._modules.current
        kind, path, attribute = self._modules.state(number)
        return kind, f"{path}.{attribute}"

    def _new_leaf(self, tensor: torch.Tensor, views: LeafViews | None, *, content: torch.Tensor | None = None) -> int:
        with self._leaf_lock:  # another thread may just have added it
            self._pull_marks(_storages((tensor,)))
            mark = get_mark(tensor)
            if mark is not None and mark[0] is self._token and content is None:
                if views is None and not isinstance(mark[2], dict):
                    self._calls.known.append(mark)
                    return mark[1]
                if isinstance(mark[2], dict):
                    views = mark[2]
                    if view_key(tensor) in views:
                        return views[view_key(tensor)]
            storages = array("Q", self._origins(_storages((tensor,))) if content is None else ())
            number = self._next_leaf(storages, in_parts=views is not None)
            if not number:  # another thread just read it, in C++
                known = self._mark_of(storages[0])
                assert known is not None
                return known[1]
            try:
                self._add_leaf(number, tensor, views, content)
            except BaseException:  # its number is taken: content unknown
                unknown = tensor.dtype, tuple(tensor.shape), None, None
                self._leaves[number] = "other", self._modules.current, unknown, self._position(), None
                for storage in storages:
                    self._library.set_node(self._recorder, storage, number, 1)
                raise
            if content is not None:
                self._push_marks(_storages((tensor,)))
            self._calls.known += _marks_of(_storages((tensor,)))
            return number

    def _storage_key(self, tensor: torch.Tensor) -> int:
        return int(self._library.origin(storage_key(tensor) or 0) or 0)

    # --------------------------------------------------------------------------------------- numbers of both together

    def _position(self) -> int:
        return int(self._library.count(self._recorder, RECORDS))

    def _leaf_count(self) -> int:
        return int(self._library.count(self._recorder, LEAVES))

    def _next_leaf(self, storages: array[int] | None = None, *, in_parts: bool = False) -> int:
        """Take the number of the next leaf, and atomically mark these storages as (parts of) it in the recorder; return
        0 if another thread just did."""
        address, count = (0, 0) if not storages else storages.buffer_info()
        return int(self._library.take_leaf(self._recorder, address, count, int(in_parts)))

    def _begin_compiled(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._pull_marks(_storages(arguments.tensors_in([*args, *kwargs.values()])))
        if self._mixed:
            self._registered.read_by(leaf_storages(self._library, self._recorder))
        super()._begin_compiled(name, args, kwargs)

    def _end_compiled(self, result: Any) -> None:
        super()._end_compiled(result)
        self._library.backward_in_python(self._recorder)
        self._push_marks(_storages(arguments.tensors_in(result)))

    def add_result(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            with untraced():
                self._pull_marks(_storages((value,)))
        super().add_result(name, value)

    # --------------------------------------------------------------------------------------------- the finished trace

    def content(self) -> bytes:
        """Return a digest of the recorder's content, without what no finished trace shows; see
        :meth:`TracingMode.content`."""
        in_python = self._records or self._leaves or self._odd_digests or self._observer.kept
        waiting = any(not isinstance(raw, TensorDigest) and is_waiting(raw) for _, raw, _ in self._results)
        threads = self._library.count(self._recorder, LANES) > 1  # records in arbitrary order
        if not self._mixed or in_python or waiting or threads or not self._position():
            return b""
        kept = content_of(self._library, self._recorder, first_sequence=self._first_sequence or 0)
        if kept is None:
            return b""
        content, leaves = kept
        registered = self._registered.along(storage for storage, _ in leaves)
        states = (self._modules.state(name) if name >= 0 else None for _, name in leaves)
        named = list(zip(registered, states, strict=True))
        rest = (named, self._contexts.modules, self._contexts.steps, self._results, self._setting_marks)
        return xxhash.xxh3_128_digest(b"".join([*content, repr(rest).encode()]))

    def built(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        # Other threads may be recording: copy referrers before what they refer to.
        results: Sequence[RawResult] = list(self._results)
        made, contexts = self._observer.records(), self._contexts
        early_results = self._collectives.note_early_reads(made, self._observer.kept)
        kept = Kept(self._library, self._recorder, self._ops.by_number)
        in_python = [kept.placed(record, contexts) for record in made]
        records: Sequence[RawRecord]
        notes: Mapping[int, Mapping[str, Any]]
        if self._mixed:
            by_number = {record.number: record for record in in_python}
            records = list(kept.records(contexts, by_number, self._odd_digests))
            leaves = list(kept.leaves(contexts, self._modules.state, self._registered, self._leaves))
            numbers = [record.number for record in records]
            notes = self._observer.notes_of(set(numbers))
        else:
            numbers, leaves = (
                sorted([record.number for record in in_python]),
                [leaf for _, leaf in sorted(self._leaves.items(), reverse=True)],
            )
            records, results, notes = self._observer.resolved(in_python, results)
        lanes = kept.lanes()
        lane_of = list(map(kept.lane_of, numbers)) if len(lanes) > 1 else []
        callers = kept.callers()
        callers |= callers_of(numbers, lane_of, lanes) if lane_of else {}
        gaps = bool(numbers) and numbers[-1] >= len(numbers)  # failed or unfinished calls have no record
        if callers or gaps:
            places = {number: place for place, number in enumerate(numbers)}
            callers = {places[at]: places[to] for at, to in callers.items() if at in places and to in places}
            lanes = [lane._replace(position=bisect_left(numbers, lane.position)) for lane in lanes]
            if self._mixed and gaps:
                records, results, notes = without_gaps(records, results, notes)
        recorded = Recorded(records, leaves, results, self._setting_marks, notes, callers)
        if lane_of:
            recorded = in_schedule_independent_order(recorded, lane_of, lanes, self._names_of_lanes)
        trace = build_trace(
            recorded.records,
            recorded.leaves,
            recorded.results,
            marks=tuple(recorded.marks),
            notes=recorded.notes,
            hashed_inputs=not self._mixed and self._hashed_inputs,
            first_sequence=self._first_sequence or 0,
            callers=recorded.callers,
            threads=recorded.threads,
            early_results=early_results,
        )
        return trace, recorded.notes


def _take_number(library: Library, recorder: int, calls: _Calls) -> int:
    """Take a record number for this thread's last call, which Python records."""
    number = int(library.take_record(recorder))
    outer, calls.outer = calls.outer, None
    if outer is not None:
        library.close(recorder, outer, number)
    return number


def _make(library: Library, recorder: int, calls: _Calls, opened: bool, /, *_: Any, **__: Any) -> Any:
    """Make the forwarded call as it was dispatched; ``opened``: also record its inner calls. Not a method: records keep
    it by their plans, and must not keep the trace alive."""
    outer = library.open() if opened else None
    try:
        output = library.make()
    except BaseException:
        if outer is not None:
            library.close(recorder, outer, -1)
        raise
    calls.outer = outer
    return output


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages that hold the data of these tensors, where there are any."""
    storages = []
    for tensor in tensors:
        for part in components(local_tensor(tensor)):
            try:
                storages.append(part.untyped_storage())
            except (NotImplementedError, RuntimeError):
                continue
    return storages


def _marks_of(storages: Iterable[torch.UntypedStorage]) -> list[Mark]:
    return [storage._hashbench_writer for storage in storages]  # type: ignore[attr-defined]
