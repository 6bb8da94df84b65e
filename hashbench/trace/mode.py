"""``HashDebugTrace``: one dispatched call becomes one record.

The mode is a thin adapter. It writes down what a call read and wrote and decides nothing: what an op means is read off
its schema (``op_schema``), what a difference means is for ``divergence``. The hot path costs a few microseconds a call;
everything that can wait is done by ``build`` when the run is over.

How the graph is kept: every storage that a recorded op wrote carries the number of that record as an attribute
of its Python object, which lives and dies with the storage (``storage_writers``). Nothing else refers to a tensor, so
nothing is kept alive, and a recycled address is never mistaken for the tensor that lived there before.

What a trace does not see: kernels inside a fused or custom op (one record for the whole op), work that an extension
does without the dispatcher, Python threads of the model's own (torch's dispatch modes are per thread; autograd's own
threads are seen), and writes behind torch's back (a NumPy view) unless ``hash_inputs`` is on.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from hashbench.devices.ledger import Ledger
from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.records import OpRecord, SettingsMark, Trace
from hashbench.trace import arguments, file, queries
from hashbench.trace.argument_text import argument_text
from hashbench.trace.build import Ids, Place, RawLeaf, RawResult, build_record, build_trace, numbered
from hashbench.trace.callbacks import Watcher
from hashbench.trace.digest import (
    EMPTY,
    RawDigest,
    _buffer,
    _hash,
    components,
    is_waiting,
    python_digest,
    raw_digest,
    readable,
)
from hashbench.trace.module_paths import ModulePaths
from hashbench.trace.op_schema import OpPlan, Pattern, plan_of
from hashbench.trace.storage_writers import (
    LeafViews,
    Mark,
    covers_storage,
    get_mark,
    offset,
    place_in_storage,
    set_mark,
    storage_bytes,
    storage_key,
    whole_storage,
)
from hashbench.trace.undeclared_writes import Suspicions

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_current_autograd_node = torch._C._current_autograd_node
_get_sequence_nr = torch._C._autograd._get_sequence_nr
_FRESH, _INPLACE, _VIEW, _SEVERAL = Pattern.FRESH, Pattern.INPLACE, Pattern.VIEW, Pattern.SEVERAL

_PLAIN_TENSORS = frozenset((_Tensor, _Parameter))
_PLAIN_DTYPES = frozenset(
    dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype) and not name.startswith("q")
)
_PLAIN_TYPES = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class HashDebugTrace(TorchDispatchMode):
    """Records every dispatched op between ``__enter__`` and ``__exit__`` with digests of all that it wrote.

    ``with HashDebugTrace() as trace:`` alone is enough; afterwards ``trace.finish()`` is a
    :class:`~hashbench.records.Trace`, and ``trace.save(path)`` writes it as text made for ``diff -u``. The trace does
    not change results: it draws no random numbers, keeps no tensor alive and, on the CPU, waits for nothing.

    Args:
        log_path: write the text form there on exit. Default: no file.
        verbose: print each record as it is made.
        max_ops_logged: print at most so many records (``verbose``). A log file is always whole.
        include_timestamp: add the time of each call to its line in the log, in seconds since the epoch. Such notes are
            ignored by ``hashbench diff``, but ``diff -u`` sees them.
        show_exec_time: add the run time of each op to its line, in seconds; see ``include_timestamp``.
        hash_inputs: also hash every tensor just before an op reads it, which exposes writes that bypassed the
            dispatcher, and just after, which exposes writes that the op's schema does not declare.
        source_lines: record the line of the caller's code for every op.
        model: name the modules, parameters and buffers of this model from the start, and hash its state now.
        inputs: hash these example inputs now (any nesting of tensors) and name them ``input/…``.
        settings: a function that returns torch's global settings as text by name; called at every mark.
        watcher: told of every call by the id that its record will have; it may look, capture, and put content in place.
        digests: ``"fast"``, by the fastest function on each device, or ``"device"``, as on accelerators, everywhere.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The base class would wrap __torch_dispatch__ in torch._disable_dynamo: one more Python frame for every op.
        # Under torch.compile the mode is hidden by ignore_compile_internals, so dynamo never traces it.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self,
        log_path: str | Path | None = None,
        *,
        verbose: bool = False,
        max_ops_logged: int | None = None,
        include_timestamp: bool = False,
        show_exec_time: bool = False,
        hash_inputs: bool = False,
        source_lines: bool = False,
        model: torch.nn.Module | None = None,
        inputs: Any = None,
        settings: Callable[[], Mapping[str, str]] | None = None,
        watcher: Watcher | None = None,
        digests: str = "fast",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log_path = None if log_path is None else Path(log_path)
        self.verbose, self.max_ops_logged = verbose, max_ops_logged
        self.include_timestamp, self.show_exec_time = include_timestamp, show_exec_time
        self.hash_inputs, self.source_lines = hash_inputs, source_lines
        self.iteration = 0
        self.failed_op = ""
        reported = watcher is not None and watcher.wants_records
        self._notes_wanted = hash_inputs or source_lines or verbose or include_timestamp or show_exec_time or reported
        self._settings = settings
        self._watcher, self._live_ids = watcher, Ids()
        self._live_records: list[OpRecord] | None = [] if reported else None
        self._live_place = Place("", "", None)
        self._token = object()
        self._ledger = Ledger(everywhere=digests == "device")
        self._at_once = frozenset() if self._ledger.everywhere else _PLAIN_DTYPES
        self._suspicions = Suspicions()
        # Autograd's threads, one for every device, dispatch at the same time. A number is taken in one step; records
        # may be appended in another order and are sorted at the end.
        self._next_number, self._leaf_lock = itertools.count().__next__, threading.Lock()
        self._records: list[tuple[Any, ...]] = []
        self._leaves: list[RawLeaf] = []
        self._results: list[RawResult] = []
        self._setting_marks: list[SettingsMark] = []
        self._notes: dict[int, dict[str, Any]] = {}
        self._registered: dict[int, tuple[str, str, RawDigest]] = {}
        self._modules = ModulePaths()
        self._plans: dict[int, OpPlan] = {}
        self._first_sequence: int | None = None
        self._undo: ExitStack | None = None
        self._finished: Trace | None = None
        with _disable_current_modes(), torch.no_grad():
            if model is not None:
                self._register_state(model)
            if inputs is not None:
                self.register_inputs(inputs)

    # ----------------------------------------------------------------------------------- entering and leaving

    def __enter__(self) -> HashDebugTrace:
        self._refuse_to_share()
        if self._first_sequence is None:
            self._first_sequence = _get_sequence_nr()
            self._live_ids = Ids(self._first_sequence)
        with ExitStack() as undo:
            undo.enter_context(self._modules.watched())
            self.mark("start")  # before the hooks stay: a function for settings that raises must leave none behind
            self._undo = undo.pop_all()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._undo is not None:
            self._undo.close()
            self._undo = None
        self.mark("end")
        if self.log_path is not None:
            self.save(self.log_path)

    def _refuse_to_share(self) -> None:
        if self._finished is not None:
            raise HashbenchError(
                "cannot enter a trace that is finished",
                consequence="its records are closed, so new ones would be lost",
                tip="Make a new HashDebugTrace for every run.",
            )
        if any(isinstance(mode, HashDebugTrace) for mode in _get_current_dispatch_mode_stack()):
            raise HashbenchError(
                "cannot enter a trace inside another",
                consequence="each would take the other's tensors for its own inputs",
                tip="Leave the outer trace first, or use one for both.",
            )

    def is_active(self) -> bool:
        """Whether ops are being recorded now."""
        return self._undo is not None

    def mark(self, label: str) -> None:
        """Note torch's global settings at this point of the run, where ``settings=`` was given."""
        if self._settings is not None:
            found = tuple(sorted(self._settings().items()))
            self._setting_marks.append(SettingsMark(len(self._records), label, found))

    def _register_state(self, model: torch.nn.Module) -> None:
        self._modules.register(model)
        for tensor in [*model.parameters(), *model.buffers()]:
            key = storage_key(tensor)
            if key is not None and key not in self._registered:
                kind, name = self._modules.state_name(tensor)
                self._watch_leaf(f"{kind}/{name}", tensor)
                self._registered[key] = (kind, name, raw_digest(tensor, self._ledger))

    def _watch_leaf(self, node: str, tensor: torch.Tensor) -> None:
        if self._watcher is not None:
            self._watcher.leaf(node, tensor)

    def register_inputs(self, inputs: Any) -> None:
        """Name the tensors in ``inputs`` by their place and take their digests now; call with dispatch modes off."""
        for path, tensor in arguments.named_tensors(inputs):
            key = storage_key(tensor)
            if key is not None:
                self._watch_leaf(f"input/{path}", tensor)
                self._registered[key] = ("input", path, raw_digest(tensor, self._ledger))

    # ----------------------------------------------------------------------------------------------- hot path

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plan = self._plans.get(id(func)) or self._plan(func)
        if not plan.traced:
            return func(*args, **(kwargs or {}))
        token = self._token
        reads: tuple[Any, ...] = ()  # no list: what a record keeps must be small, cold memory is most of its cost
        others: Sequence[Any]
        storage: Any = None
        if plan.leading is None:
            reads, others = self._read_each(plan, args)
        else:  # nearly all calls: the schema says where the tensors are, and each bears the mark of its writer
            others = args[len(plan.leading) :]
            for place in plan.leading:
                value = args[place]
                try:
                    storage = value.untyped_storage()
                    owner, node, views = storage._hashbench_writer
                    if owner is token and views is None and type(value) in _PLAIN_TENSORS:
                        reads += (place, node, value.storage_offset())
                        continue
                except (AttributeError, NotImplementedError, RuntimeError):
                    pass  # no tensor, or one without a storage: sparse, nested, opaque
                reads, others = self._read_each(plan, args)
                break
        if kwargs:
            named_reads, named_others = self._read_named(plan, kwargs)
            reads, others = reads + named_reads, (*others, *named_others)
        elif kwargs is None:
            kwargs = {}
        node = _current_autograd_node()
        if node is not None:
            phase, sequence = "backward", node._sequence_nr()
        else:
            phase = "optimizer" if self._modules.optimizing else "forward"
            sequence = _get_sequence_nr() - 1
        rng = arguments.generator_digest(args, kwargs) if plan.seeded else None
        noted = self._note_before(plan, args, kwargs) if self._notes_wanted or plan.resizes else None
        try:
            output = plan.call(*args, **kwargs)
        except BaseException:
            self.failed_op = plan.name
            raise
        number = self._next_number()
        scalar = None
        written: tuple[RawDigest, ...] = ()
        pattern = plan.pattern
        if pattern is _VIEW and self._shows(output, storage):
            pass  # half of all calls: nothing was written
        elif pattern is _FRESH:
            written = (self._write(output, (token, number, None), plan.blank),)
        elif pattern is _INPLACE:
            written = (self._write(args[0], (token, number, None), False),)
        elif pattern is _SEVERAL and type(output) is tuple:
            mark = (token, number, None)
            # A backward that was not asked for some gradient returns None in its place.
            written = tuple([self._write(tensor, mark, plan.blank) for tensor in output if tensor is not None])
        else:
            if type(output) in _PLAIN_TYPES:
                scalar = output
            written = self._write_all(plan, args, kwargs, output, (token, number, None))
        self._records.append(
            (plan, phase, self.iteration, self._modules.current, sequence, reads, others, written, scalar, rng, number)
        )
        if noted is not None:
            self._note_after(number, plan, args, kwargs, noted)
        return output

    def _write(self, tensor: torch.Tensor, mark: Mark, blank: bool) -> RawDigest:
        """The digest of a tensor just written; its storage gets ``mark``. A stride of ``None`` means contiguous."""
        try:
            dtype = tensor.dtype
            if type(tensor) in _PLAIN_TENSORS and dtype in self._at_once and tensor.is_cpu and tensor.is_contiguous():
                tensor.untyped_storage()._hashbench_writer = mark  # type: ignore[attr-defined]
                if blank:
                    return dtype, tensor.shape, None, None
                size, address = tensor.nbytes, tensor.data_ptr()
                if not size:
                    return dtype, tensor.shape, None, EMPTY
                if address:
                    return dtype, tensor.shape, None, _hash(_buffer[size](address))
        except (NotImplementedError, RuntimeError):
            pass  # a tensor without a storage or strides: sparse, nested, opaque; without an address: zero tensors
        set_mark(tensor, mark)
        found = raw_digest(tensor, self._ledger)
        return (*found[:3], None) if blank else found

    def _plan(self, func: Any) -> OpPlan:
        plan = plan_of(func)
        if self._watcher is not None and plan.traced:
            plan = replace(plan, call=functools.partial(self._watched_call, self._watcher, func, plan))
        self._plans[id(func)] = plan
        return plan

    def _watched_call(self, watcher: Watcher, func: Any, plan: OpPlan, /, *args: Any, **kwargs: Any) -> Any:
        """The call of an op, with the watcher told before and after it."""
        node = _current_autograd_node()
        phase = "backward" if node is not None else "optimizer" if self._modules.optimizing else "forward"
        place = self._live_ids.add_record(
            plan.name,
            phase=phase,
            iteration=self.iteration,
            module=self._modules.current,
            sequence=_get_sequence_nr() - 1 if node is None else node._sequence_nr(),
        )
        try:
            watcher.before(place.id, func, args, kwargs)
            output = plan.call(*args, **kwargs)
            watcher.after(place.id, func, args, kwargs, output)
        except BaseException:
            self._live_ids.take_back_record()
            raise
        self._live_place = place
        return output

    # --------------------------------------------------------------------------- what the hot path seldom needs

    def _write_all(
        self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, mark: Mark
    ) -> tuple[RawDigest, ...]:
        """Digests of all that a call wrote: fresh outputs first, then written arguments in the schema's order."""
        targets = arguments.tensors_in(plan.written_values(args, kwargs)) if plan.writes_arguments else []
        seen = {id(tensor) for tensor in targets}
        fresh = [
            tensor
            for tensor in arguments.tensors_in(output)
            if id(tensor) not in seen and (plan.fresh or not self._is_marked(tensor))
        ]
        return tuple([self._write(tensor, mark, plan.blank) for tensor in fresh + targets])

    def _shows(self, tensor: torch.Tensor, storage: Any) -> bool:
        """Whether a view shows ``storage``, that of the argument last read, or any other that this trace knows."""
        try:
            return tensor.untyped_storage() is storage or self._is_marked(tensor)
        except (NotImplementedError, RuntimeError):
            return self._is_marked(tensor)

    def _is_marked(self, tensor: torch.Tensor) -> bool:
        try:
            found: bool = tensor.untyped_storage()._hashbench_writer[0] is self._token  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError, RuntimeError):
            mark = get_mark(tensor) if isinstance(tensor, _Tensor) else None
            return mark is not None and mark[0] is self._token
        return found

    def _read_each(self, plan: OpPlan, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What a call reads, place, writer and offset after each other, and its other positional arguments."""
        reads: list[Any] = []
        others: list[Any] = []
        for place, value in enumerate(args):
            kind = type(value)
            if kind in _PLAIN_TENSORS:
                try:
                    storage = value.untyped_storage()
                    owner, node, views = storage._hashbench_writer
                    if owner is not self._token and value.nbytes >= storage.nbytes() and value.is_contiguous():
                        owner, node, views = self._token, self._new_leaf(value, None), None
                    if owner is self._token and views is None:
                        reads += (place, node, value.storage_offset())
                        continue
                except (NotImplementedError, RuntimeError):
                    pass  # without a storage: sparse, nested, opaque
                self._read(plan, place, value, reads, others)
            elif kind in _PLAIN_TYPES or (kind is list and value and type(value[0]) is int):
                others.append(value)  # the schema knows no list that mixes tensors with sizes
            else:
                self._read(plan, place, value, reads, others)
        return tuple(reads), tuple(others)

    def _read_named(self, plan: OpPlan, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The same for keyword arguments; the others are kept with their names."""
        reads: list[Any] = []
        others: list[Any] = []
        for name, value in kwargs.items():
            if type(value) in _PLAIN_TYPES:
                others.append((name, value))
            else:
                self._read(plan, name, value, reads, others)
        return tuple(reads), tuple(others)

    def _read(self, plan: OpPlan, place: int | str, value: Any, reads: list[Any], others: list[Any]) -> None:
        """One argument that is not simply a marked tensor: a leaf, a list, an odd tensor, or any other object."""
        if isinstance(value, torch.Tensor):
            for part in components(value) or [value]:
                reads += (place, self._node(part, written=plan.writes(place)), offset(part))
            if value.is_complex() and value.is_conj():
                others.append(("conj", place))
            return
        plain = value
        if isinstance(value, (list, tuple)):
            plain = []
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    self._read(plan, f"{place}.{index}", item, reads, others)
                else:
                    plain.append(item)
            if value and not plain:
                return
        others.append((place, plain) if isinstance(place, str) else plain)

    def _node(self, tensor: torch.Tensor, *, written: bool) -> int:
        """The number of the record or leaf that wrote this tensor last; an unknown tensor becomes a leaf."""
        mark = get_mark(tensor)
        if mark is not None and mark[0] is not self._token:
            mark = None
        if mark is not None and mark[2] is None:
            return mark[1]
        place = place_in_storage(tensor)
        views: LeafViews | None = mark[2] if mark is not None else None
        if views is None and not covers_storage(tensor):
            views = LeafViews()
        if views is not None and written:  # the rest of the memory was seen by nobody, and is no leaf after the write
            return self._new_leaf(tensor, None, content=whole_storage(tensor))
        if views is not None and place in views.numbers:
            return views.numbers[place]
        return self._new_leaf(tensor, views)

    def _new_leaf(self, tensor: torch.Tensor, views: LeafViews | None, *, content: torch.Tensor | None = None) -> int:
        """Hash a tensor that no op of this trace wrote, name it, and mark its storage with its number."""
        with self._leaf_lock:
            return self._new_leaf_alone(tensor, views, content)

    def _new_leaf_alone(self, tensor: torch.Tensor, views: LeafViews | None, content: torch.Tensor | None) -> int:
        kind, name = self._modules.state_name(tensor)
        initial = None
        if self._registered:
            kind, name, initial = self._registered.get(storage_key(tensor) or 0, (kind, name, None))
        if not kind:
            kind = "parameter" if isinstance(tensor, _Parameter) else "other"
            name = self._modules.current
        number = -1 - len(self._leaves)
        if self._watcher is not None:
            self._watch_leaf(self._live_ids.add_leaf(kind, name), tensor if content is None else content)
        if views is None:
            found = self._write(tensor if content is None else content, (self._token, number, None), blank=False)
        else:
            views.numbers[place_in_storage(tensor)] = number
            set_mark(tensor, (self._token, number, views))
            found = raw_digest(tensor, self._ledger)
        seen = found if content is None else raw_digest(tensor, self._ledger)
        registered = None if initial is None else (initial, seen)
        self._leaves.append((kind, name, found, len(self._records), registered))
        return number

    # ------------------------------------------------------------ notes: the diagnosis pass, verbose, resize_

    def _note_before(self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        noted: dict[str, Any] = {}
        if plan.resizes:
            noted["sizes"] = [
                (tensor, storage_key(tensor), storage_bytes(tensor))
                for tensor in arguments.tensors_in([*args, *kwargs.values()])
            ]
        if self.hash_inputs:
            named = arguments.named_arguments(args, kwargs)
            noted["inputs"] = {path: raw_digest(tensor, self._ledger) for path, tensor in named}
        if self.source_lines:
            noted["source"] = arguments.caller_line(sys._getframe(1).f_back)
        noted["time"], noted["clock"] = time.time(), time.perf_counter()
        return noted

    def _note_after(
        self, number: int, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], noted: dict[str, Any]
    ) -> None:
        kept: dict[str, Any] = {}
        for tensor, storage, size in noted.get("sizes", ()):
            if storage_key(tensor) == storage and storage_bytes(tensor) > size:
                # resize_ grew it: the new part is memory that nobody wrote
                set_mark(tensor, (self._token, number, None))
                self._replace_written(number, ((*raw_digest(tensor, self._ledger)[:3], None),))
        if self.hash_inputs:
            kept["inputs"] = noted["inputs"]
            self._note_undeclared_writes(number, plan, args, kwargs, noted["inputs"])
        if self.source_lines:
            kept["source"] = noted["source"]
        if self.include_timestamp:
            kept["time"] = f"{noted['time']:.6f}"
        if self.show_exec_time:
            kept["seconds"] = f"{time.perf_counter() - noted['clock']:.6f}"
        if kept:
            self._notes[number] = kept
        if self.verbose and (self.max_ops_logged is None or number < self.max_ops_logged):
            print(self._line(number))
        if self._live_records is not None and self._watcher is not None:
            self._live_records.append(self._live_record(number, self._live_records))
            self._watcher.recorded(self._live_records[-1])

    def _live_record(self, number: int, earlier: Sequence[OpRecord]) -> OpRecord:
        place = self._live_place
        forward = None if place.forward is None else earlier[place.forward]
        self._settle()
        raw = self._suspicions.settled(self._records[self._place_of(number)])
        return build_record(raw, self._live_ids, place, forward, self._notes.get(number, {}))

    def _note_undeclared_writes(
        self, number: int, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], before: Mapping[str, RawDigest]
    ) -> None:
        """An argument that changed although the schema does not say so was written by this op all the same."""
        declared = {id(tensor) for tensor in arguments.tensors_in(plan.written_values(args, kwargs))}
        changed = []
        for path, tensor in arguments.named_arguments(args, kwargs):
            if id(tensor) in declared or plan.resizes:
                continue
            after = raw_digest(tensor, self._ledger)
            if after == before[path]:
                continue
            mark = get_mark(tensor)
            if is_waiting(after) and mark is not None and mark[0] is self._token:
                set_mark(tensor, self._suspicions.mark(number, mark, (before[path], after)))
            elif readable(after) != readable(before[path]):
                set_mark(tensor, (self._token, number, None))
                changed.append(after)
        if changed:
            self._replace_written(number, self._records[self._place_of(number)][7] + tuple(changed))

    def _settle(self) -> None:
        """Add the writes that no schema declared to the records that made them, as far as these are known by now."""
        for number, found in self._suspicions.settle():
            self._replace_written(number, (*self._records[self._place_of(number)][7], found))

    def _settled(self) -> tuple[Sequence[tuple[Any, ...]], Sequence[RawResult], Mapping[int, Mapping[str, Any]]]:
        """Records, results and notes whose numbers are the places of records, and nothing is left to find out."""
        self._settle()
        node_of = self._suspicions.node
        results = [(name, found, None if node is None else node_of(node)) for name, found, node in self._results]
        return numbered([self._suspicions.settled(record) for record in self._records], results, self._notes)

    def _replace_written(self, number: int, written: tuple[RawDigest, ...]) -> None:
        place = self._place_of(number)
        record = self._records[place]
        self._records[place] = (*record[:7], written, *record[8:])

    def _place_of(self, number: int) -> int:
        """Where a record stands: at its number, as long as one thread alone dispatches."""
        records = self._records
        if number < len(records) and records[number][-1] == number:
            return number
        return next(place for place in reversed(range(len(records))) if records[place][-1] == number)

    def _line(self, number: int) -> str:
        plan, phase, _, module, _, _, others, written, scalar, *_ = self._records[self._place_of(number)]
        values = " ".join(f"{d.dtype}{list(d.shape)}:{d.value or 'blank'}" for d in map(readable, written))
        shown = f" = {scalar!r}" if scalar is not None else ""
        notes = self._notes.get(number, {})
        extra = "".join(f" {key}={notes[key]}" for key in ("source", "time", "seconds") if key in notes)
        return f"[{number:03d}] {phase} {module} {plan.name}({argument_text(others)}) {values}{shown}{extra}"

    # ------------------------------------------------------------------------------------ results and finishing

    def add_result(self, name: str, value: Any) -> None:
        """Note something by which runs are compared, at its final content: a tensor, or a plain Python value."""
        if not isinstance(value, torch.Tensor):
            self._results.append((name, python_digest(value), None))
            return
        with _disable_current_modes(), torch.no_grad():
            mark: Mark | None = get_mark((components(value) or [value])[0])
            node = mark[1] if mark is not None and mark[0] is self._token else None
            if mark is not None and node is not None and mark[2] is not None:
                node = mark[2].numbers.get(place_in_storage(value), node)
            self._results.append((name, raw_digest(value, self._ledger), node))

    def finish(self) -> Trace:
        """Everything recorded, as a :class:`~hashbench.records.Trace`; the raw records are released."""
        if self._finished is None:
            self._ledger.read()
            records, results, notes = self._settled()
            self._notes = {number: dict(kept) for number, kept in notes.items()}
            self._finished = build_trace(
                records,
                self._leaves,
                results,
                marks=tuple(self._setting_marks),
                notes=self._notes,
                hashed_inputs=self.hash_inputs,
                first_sequence=self._first_sequence or 0,
            )
            self._records, self._leaves, self._results = [], [], []
            self._suspicions = Suspicions()
        return self._finished

    def save(self, path: str | Path) -> None:
        """Write the trace as text (see ``trace.file``), atomically."""
        notes = {
            number: " ".join(f"{key}={kept[key]}" for key in ("time", "seconds") if key in kept)
            for number, kept in self._notes.items()
        }
        file.write(self.finish(), Path(path), notes={n: text for n, text in notes.items() if text})

    # ----------------------------------------------------------------------- the ancestor's questions to a trace

    @property
    def stats(self) -> dict[str, Any]:
        """Numbers of ops and tensors so far, see :func:`hashbench.trace.queries.stats`."""
        return queries.stats(self._so_far())

    @property
    def stack_log(self) -> list[dict[str, Any]]:
        """One entry per record with what it read, see :func:`hashbench.trace.queries.stack_log`."""
        return queries.stack_log(self._so_far())

    def _so_far(self) -> Trace:
        """The trace as it is now: while ops are being recorded, of those that there are."""
        if not self.is_active():
            return self.finish()
        records, results, notes = self._settled()
        return build_trace(
            records,
            self._leaves,
            results,
            marks=(),
            notes=notes,
            hashed_inputs=self.hash_inputs,
            first_sequence=self._first_sequence or 0,
        )

    def print_summary(self, top: int = 10, *, to_file: bool = False) -> None:
        """Print how many ops of which kind were recorded; with ``to_file`` into ``<log_path>.summary`` instead."""
        text = queries.summary(self.finish(), top=top)
        if to_file and self.log_path is not None:
            replace_file(self.log_path.with_name(f"{self.log_path.name}.summary"), text + "\n")
        else:
            print(text)

    def get_tensor_flow_graph(self) -> list[dict[str, Any]]:
        """One entry per record, see :func:`hashbench.trace.queries.tensor_flow`."""
        return queries.tensor_flow(self.finish())

    def find_tensor_by_hash(self, value: str) -> list[dict[str, str]]:
        """Where a digest was written and read, see :func:`hashbench.trace.queries.find_by_hash`."""
        return queries.find_by_hash(self.finish(), value)

    def export_to_json(self, path: str | Path) -> None:
        """Write the trace as one JSON document: ``records``, ``leaves``, ``results``."""
        file.write_json(self.finish(), Path(path))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.finish().records)
