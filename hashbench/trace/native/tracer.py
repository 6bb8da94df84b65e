"""The native tracer's part in Python: answers the recorder while a trace is made, and finishes the trace.

The recorder writes down calls on dense CPU tensors. All others it hands over one by one, and all where somebody looks
at every call: those are recorded as under the dispatch mode, of which this is a subclass, but no mode is active. Both
share the numbers of records and leaves, and who wrote a storage last.
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
from hashbench.trace.lanes import Recorded, arranged, callers_of
from hashbench.trace.mode import TracingMode, _current_autograd_node, _get_sequence_nr, call_with_callback, is_parameter
from hashbench.trace.module_paths import ModuleStack, NamedState
from hashbench.trace.native.decode import Kept, content_of, leaf_storages
from hashbench.trace.native.ops import Ops, plan_of
from hashbench.trace.op_schema import OpPlan
from hashbench.trace.storage_writers import LeafViews, Mark, get_mark, set_mark, storage_key, view_key
from hashbench.trace.threads import Starts

_Int32 = ctypes.c_int32


class _Calls(threading.local):
    """The state of one thread: its lane, where it is not the program's own. Of the call that Python records, which may
    interrupt another: what was open around it, the storages that it was given, and marks that the recorder knows."""

    def __init__(self) -> None:
        self.lane: _Lane | None = None
        self.outer: int | None = None
        self.given: Set[int] = frozenset()
        self.known: list[Mark] = []


class _Lane:
    """A thread, or a piece of work for a pool, that a traced program starts. ``name`` is how it is told in ids."""

    def __init__(self, tracer: NativeTracer, number: int, name: str, context: int) -> None:
        self.tracer, self.number, self.name, self.context = tracer, number, name, context
        self.started: dict[int, int] = defaultdict(int)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self.tracer.entered(self):
            return function(*args, **kwargs)


class _RecordersStack(ModuleStack):
    """The recorder's own stack of modules, of the thread whose calls it records."""

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
    """Records as :class:`~hashbench.trace.mode.TracingMode` does, but by a fallback on a dispatch key of its own: what
    is traced runs as it runs untraced."""

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
                "cannot enter a native trace while another thread makes one",
                consequence="the recorder sees all threads of a process",
                tip='Leave the other first, or trace both with HashDebugTrace(tracer="python").',
            )
        try:
            self._begin()
            self._library.listener = self
            self._follow()
        except BaseException:
            self._library.end(self._recorder)
            self._library.listener = None
            self._rest()
            self._stop()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        self._rest()
        failed = self._library.end(self._recorder)
        self._library.listener = None
        if failed >= 0:
            self.failed_op = self._ops.by_number[failed].plan.name
        self._end(*exception)
        errors, self._library.errors = self._library.errors, []
        if errors and exception[0] is None:
            raise errors[-1]

    def finish(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """All that was recorded, and notes by record number; the raw records are released."""
        built = super().finish()
        self._modules.use(ModuleStack())
        self._context = ctypes.c_uint32()
        with self._entering:
            # A thread may be in a call, also this one, which ends the trace: it keeps this object, and the recorder.
            if not self._entered and not self._library.count(self._recorder, CALLS):
                recorder, self._recorder = self._recorder, 0
                self._library.delete(recorder)
        return built

    def _rest(self) -> None:
        super()._rest()
        self._starts.rest()
        self._library.thread(0)

    def _follow(self) -> None:
        super()._follow()
        self._starts.follow(self._begin_lane)
        self._library.thread(1)

    # ------------------------------------------------------------------------------------- threads of the program's own

    def _begin_lane(self) -> _Lane | None:
        """A lane for what this thread starts; ``None`` where its own calls are not recorded."""
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
        """Record the calls of this thread in a lane, unless the trace is over."""
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
        with torch._C.DisableTorchFunction():  # a mode of the program's own sees what is asked of tensors
            tensors = array("Q", [0 if tensor is None else tensor._cdata for tensor in state.tensors])
        self._library.name(self._recorder, tensors.buffer_info()[0], len(tensors), state.first)

    # ------------------------------------------------------------------------------------------ what the recorder asks

    def name_of_leaf(self, tensor: torch.Tensor, number: int) -> int:
        """The number of a leaf's name, ``number`` where it is that parameter or buffer still; -1 where it has none, or
        -2 where it is a parameter."""
        if number >= 0 and self._modules.is_state(number, tensor):
            return number
        return -2 if is_parameter(tensor) else -1

    def digest_odd(self, tensor: torch.Tensor, number: int, *, blank: bool) -> int:
        """Hash and mark what record ``number`` wrote, a tensor that the recorder cannot hash."""
        with unrecorded():
            set_mark(tensor, (self._token, number, None))
            self._take(_storages((tensor,)))
            digest = raw_digest(tensor, self._ledger)
        self._odd_digests.append((*digest[:3], None) if blank else digest)
        return len(self._odd_digests) - 1

    def handle(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call that the recorder handed over, and record it, unless its op is not to be: such as those that the
        backward of compiled code calls."""
        plan = self._plans.get(id(func)) or self._plan(func)
        if not plan.traced:
            return self._library.make()
        calls, observer = self._calls, self._observer
        interrupted = calls.outer, calls.given, calls.known, observer.last
        try:
            calls.outer = None
            if self._records_nothing:
                return self._show(plan, args, kwargs)
            given = arguments.tensors_in([*args, *kwargs.values()])
            storages = _storages(given)
            self._bring(storages)
            calls.given, calls.known = set(self._origins(storages)), _marks_of(storages)
            output = self.__torch_dispatch__(func, (), args, kwargs)
            self._take(_storages((*given, *arguments.tensors_in(output))))
            return output
        finally:
            self._close()  # a watcher may raise once the call is made
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
        """End the call that this thread has made last where no record has done so."""
        outer, self._calls.outer = self._calls.outer, None
        if outer is not None:
            self._library.close(self._recorder, outer, -1)

    def _bring(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Mark storages in Python as the recorder knows them."""
        for storage in storages:
            mark = self._mark_of(self._library.origin(storage._cdata))
            if mark is not None:
                storage._hashbench_writer = mark  # type: ignore[attr-defined]

    def _mark_of(self, storage: int) -> Mark | None:
        node = _Int32()
        state = self._library.node(self._recorder, storage, node)
        return (self._token, node.value, None) if state == KNOWN else None

    def _is_marked(self, tensor: torch.Tensor) -> bool:
        """As inherited, or by the recorder: Python is shown other tensors in place of plain ones, but a conjugated view
        itself."""
        return super()._is_marked(tensor) or any(
            origin in self._calls.given or self._mark_of(origin) is not None
            for origin in self._origins(_storages((tensor,)))
        )

    def _origins(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[int]:
        """The program's own storages of what Python is shown."""
        return (self._library.origin(storage._cdata) for storage in storages)

    def _take(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Tell the recorder who wrote storages, but for marks that it knows: another thread may have written since."""
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
        with self._leaf_lock:  # another thread may just have made it
            self._bring(_storages((tensor,)))
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
            if not number:  # another thread has just read it, in C++
                known = self._mark_of(storages[0])
                assert known is not None
                return known[1]
            try:
                self._add_leaf(number, tensor, views, content)
            except BaseException:  # its number is taken: what it holds is not known
                unknown = tensor.dtype, tuple(tensor.shape), None, None
                self._leaves[number] = "other", self._modules.current, unknown, self._position(), None
                for storage in storages:
                    self._library.set_node(self._recorder, storage, number, 1)
                raise
            if content is not None:
                self._take(_storages((tensor,)))
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
        """The number of the leaf that is to be added next. In the same step the recorder is told that these storages
        show it, or parts of it; 0 where it just found so itself."""
        address, count = (0, 0) if not storages else storages.buffer_info()
        return int(self._library.take_leaf(self._recorder, address, count, int(in_parts)))

    def _begin_compiled(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._bring(_storages(arguments.tensors_in([*args, *kwargs.values()])))
        if self._mixed:
            self._registered.read_by(leaf_storages(self._library, self._recorder))
        super()._begin_compiled(name, args, kwargs)

    def _end_compiled(self, result: Any) -> None:
        super()._end_compiled(result)
        self._library.backward_in_python(self._recorder)
        self._take(_storages(arguments.tensors_in(result)))

    def add_result(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            with untraced():
                self._bring(_storages((value,)))
        super().add_result(name, value)

    # --------------------------------------------------------------------------------------------- the finished trace

    def content(self) -> bytes:
        """See :meth:`TracingMode.content`: a digest of what the recorder kept, less what no finished trace shows."""
        in_python = self._records or self._leaves or self._odd_digests or self._observer.kept
        waiting = any(not isinstance(raw, TensorDigest) and is_waiting(raw) for _, raw, _ in self._results)
        threads = self._library.count(self._recorder, LANES) > 1  # their records come in any order
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
        # Other threads may be recording: what is taken first refers to nothing that is not taken.
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
        gaps = bool(numbers) and numbers[-1] >= len(numbers)  # some failed, or are not done, and have no record
        if callers or gaps:
            places = {number: place for place, number in enumerate(numbers)}
            callers = {places[at]: places[to] for at, to in callers.items() if at in places and to in places}
            lanes = [lane._replace(position=bisect_left(numbers, lane.position)) for lane in lanes]
            if self._mixed and gaps:
                records, results, notes = without_gaps(records, results, notes)
        recorded = Recorded(records, leaves, results, self._setting_marks, notes, callers)
        if lane_of:
            recorded = arranged(recorded, lane_of, lanes, self._names_of_lanes)
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
    """The number of a record that Python has, of the call that this thread has made last."""
    number = int(library.take_record(recorder))
    outer, calls.outer = calls.outer, None
    if outer is not None:
        library.close(recorder, outer, number)
    return number


def _make(library: Library, recorder: int, calls: _Calls, opened: bool, /, *_: Any, **__: Any) -> Any:
    """Make the call that the recorder handed over, as it was to be made; ``opened``: what it calls is recorded. No
    method: a trace's records keep it by their plans, and would keep the trace."""
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
    """The memory that holds the data of these tensors, of those that have one."""
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
