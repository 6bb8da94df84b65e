"""Dispatch mode behind ``HashDebugTrace``: one dispatched call becomes one raw record.

The hot path records the reads and writes of a call in a few microseconds and decides nothing; everything that can wait
is left to ``build``. Every storage that a recorded op wrote carries the number of that record (``storage_writers``), so
records neither refer to tensors nor keep them alive.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hashbench.devices.ledger import Ledger
from hashbench.native.library import is_recorded, unrecorded
from hashbench.records import SettingsMark, TensorDigest, Trace
from hashbench.trace import arguments
from hashbench.trace.build import RawLeaf, RawResult, RecordIdentity, build_trace
from hashbench.trace.callbacks import CallObserver, TraceOptions
from hashbench.trace.collectives import Collectives
from hashbench.trace.compiled import CompiledCalls, Exports, is_compiled_backward, skip_frames
from hashbench.trace.digest import (
    BY_DTYPE,
    EMPTY,
    PIECE,
    RawDigest,
    _buffer,
    _hash,
    components,
    has_no_data,
    hash_memory,
    is_distributed,
    is_whole,
    local_tensor,
    python_digest,
    raw_digest,
    readable,
    untraced,
)
from hashbench.trace.module_paths import ModuleListener, ModulePaths, NamedState
from hashbench.trace.op_schema import GROUP, OpPlan, Pattern, plan_of
from hashbench.trace.registered import Registered
from hashbench.trace.storage_writers import (
    IN_FLIGHT,
    LeafViews,
    Mark,
    covers_storage,
    get_mark,
    offset,
    set_mark,
    storage_key,
    view_key,
    whole_storage,
)

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_current_autograd_node = torch._C._current_autograd_node
_get_sequence_nr = torch._C._autograd._get_sequence_nr
_modes = torch._C._len_torch_dispatch_stack
_FRESH, _INPLACE, _VIEW, _SEVERAL = Pattern.FRESH, Pattern.INPLACE, Pattern.VIEW, Pattern.SEVERAL
_GENERAL = Pattern.GENERAL

_PLAIN_TENSORS = frozenset((_Tensor, _Parameter))
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_PLAIN_DTYPES = frozenset(dtype for name, dtype in _DTYPES.items() if not name.startswith("q")) - BY_DTYPE.keys()
PLAIN_TYPES = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def _no_op(*_: Any, **__: Any) -> None:
    """Placeholder callable."""


class _WithoutContentError(Exception):
    """An op returned a fake tensor: nothing was computed, and no record is made."""


def is_parameter(tensor: torch.Tensor) -> bool:
    """Check ``isinstance(tensor, nn.Parameter)`` without the Python metaclass hook for plain tensors."""
    kind = type(tensor)
    if kind is _Tensor:
        return getattr(tensor, "_is_param", False)
    return kind is _Parameter or isinstance(tensor, _Parameter)


def is_tracing() -> bool:
    """Return True if a trace is active in this thread."""
    if is_recorded():
        return True
    return _modes() > 0 and any(isinstance(mode, TracingMode) for mode in _get_current_dispatch_mode_stack())


class _NoPlans(dict[int, OpPlan]):
    """Plan table used while tracing is suspended: no op is recorded."""

    _SKIPPED = OpPlan(name="", call=_no_op, traced=False)

    def get(self, *_: Any) -> OpPlan:
        return self._SKIPPED


class _PlansBehindCompiledCode(dict[int, OpPlan]):
    """Plan table used after compiled code ran: ops called by its backward are not recorded."""

    def get(self, function: int, *_: Any) -> OpPlan | None:  # type: ignore[override]
        return _NoPlans._SKIPPED if is_compiled_backward(_current_autograd_node()) else super().get(function)


class TracingMode(TorchDispatchMode, ModuleListener):
    """Dispatch mode that records every op with digests of its outputs.

    Attributes:
        iteration: written into every record: set by the caller, or by default the step count of the most frequently
            stepped optimizer.
        failed_op: name of the op that raised last.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The base class would wrap __torch_dispatch__ in torch._disable_dynamo: one more Python frame for every op.
        # ``skip_frames`` below has the same effect at no cost.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, options: TraceOptions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.iteration: int | None = None
        self.failed_op = ""
        self._token = object()
        self._ledger = Ledger(everywhere=options.digests == "device")
        self._at_once = frozenset() if self._ledger.everywhere else _PLAIN_DTYPES
        # Autograd's threads, one per device, dispatch concurrently. Taking a number is atomic; records may be
        # appended in another order and are sorted at the end.
        self._next_number, self._leaf_lock = itertools.count().__next__, threading.RLock()
        self._records: list[tuple[Any, ...]] = []  # each a RawRecord as a plain tuple
        self._leaves: dict[int, RawLeaf] = {}  # by number
        self._results: list[RawResult] = []
        self._setting_marks: list[SettingsMark] = []
        self._registered = Registered()
        self._modules = ModulePaths()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] | None = weakref.WeakKeyDictionary()
        self._plans: dict[int, OpPlan] = {}
        self._first_sequence: int | None = None
        self._state: dict[int, int] = {}  # numbers of parameters and buffers by their id
        self._active = False
        self._compiled_calls: CompiledCalls | None = None
        self._exports: Exports | None = None
        self._hashed_inputs = options.hash_inputs
        self._compiled_call: tuple[Any, ...] = ()
        self._observer = CallObserver(options, self._token, self._ledger, self._records)
        self._records_nothing = self._observer.records_nothing
        self._collectives = Collectives(self._token, self._ledger)

    @property
    def active(self) -> bool:
        return self._active

    def __enter__(self) -> TracingMode:
        self._begin()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._end(*exception)

    def _begin(self) -> None:
        """Start following modules, optimizers, and calls of compiled code."""
        if self._first_sequence is None:
            self._first_sequence = self._observer.ids.first_sequence = _get_sequence_nr()
        self._active = True
        try:
            self._modules.start(self)
            self._compiled_calls = CompiledCalls(self._begin_compiled, self._end_compiled)
            self._compiled_calls.start()
            self._exports = Exports(self._suspend, self._resume)
            self._exports.start()
        except BaseException:
            self._stop()
            raise

    def _end(self, *exception: Any) -> None:
        if exception[0] is None and self._collectives.under_way:  # now: later code may overwrite unread outputs
            with untraced():
                self._collectives.finish()
        if self._active:
            self._stop()

    def _stop(self) -> None:
        self._active = False
        for watch in (self._exports, self._compiled_calls):
            if watch is not None:
                watch.stop()
        self._exports = self._compiled_calls = None
        self._modules.stop()

    def _suspend(self) -> None:
        """Stop following modules."""
        self._modules.remove_hooks()

    def _resume(self) -> None:
        self._modules.install_hooks()

    # --------------------------------------------------------------------------------------------- iterations

    def begin_iteration(self, number: int | None = None) -> None:
        """Begin iteration ``number`` (default: the next one). Steps of optimizers are no longer counted."""
        if number is None:
            number = 1 if self._steps is not None or self.iteration is None else self.iteration + 1
        self._steps, self.iteration = None, number
        self.changed()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step: iterations are counted by the most frequently stepped optimizer."""
        if self._steps is not None:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
            self.iteration = max(self.iteration or 0, self._steps[optimizer])
            self.changed()

    def changed(self) -> None:
        """Called when the iteration changed, or an optimizer step begins or ends."""

    # ------------------------------------------------------------------------- what the caller names and notes

    def register_model(self, model: torch.nn.Module) -> NamedState:
        with untraced(), torch._C.DisableTorchFunction():  # lazy parameters raise for shape
            found = self._modules.register(model)
            TracingMode.named(self, found)
            for tensor in [*model.parameters(), *model.buffers()]:
                if not self._records_nothing and local_tensor(tensor) not in self._registered:
                    self._register(tensor, *TracingMode._state_name(self, tensor))
        return found

    def named(self, state: NamedState) -> None:
        last = state.first + len(state.tensors) - 1
        self._state.update(zip(map(id, reversed(state.tensors)), itertools.count(last, -1)))

    def register_inputs(self, inputs: Any) -> None:
        if self._records_nothing:
            return
        with untraced():
            for path, tensor in arguments.named_tensors(inputs):
                self._register(tensor, "input", path)

    def _register(self, tensor: torch.Tensor, kind: str, name: str) -> None:
        tensor = local_tensor(tensor)
        if storage_key(tensor) is not None:
            if self._observer.callback is not None:
                self._observer.callback.leaf(f"{kind}/{name}", tensor)
            registration = kind, name, raw_digest(tensor, self._ledger)
            self._registered.add(tensor, registration, leaves=self._leaf_count())

    def mark(self, label: str, settings: Mapping[str, str]) -> None:
        self._setting_marks.append(SettingsMark(self._position(), label, tuple(sorted(settings.items()))))

    def add_result(self, name: str, value: Any) -> None:
        if self._records_nothing:
            return
        if not isinstance(value, torch.Tensor):
            self._results.append((name, python_digest(value), None))
            return
        with untraced():
            value = local_tensor(value)
            mark: Mark | None = get_mark((components(value) or [value])[0])
            node = mark[1] if mark is not None and mark[0] is self._token else None
            if mark is not None and node is not None and mark[2] is IN_FLIGHT:
                self._collectives.read(node, value, position=self._position(), result=name)
            elif mark is not None and node is not None and isinstance(mark[2], dict):
                node = mark[2].get(view_key(value), node)
            self._results.append((name, raw_digest(value, self._ledger), node))

    def _position(self) -> int:
        """Return the number of records so far."""
        return len(self._records)

    def _leaf_count(self) -> int:
        return len(self._leaves)

    def _next_leaf(self) -> int:
        """Return the number of the next leaf."""
        return -1 - self._leaf_count()

    # --------------------------------------------------------------------------------------------- the finished trace

    def content(self) -> bytes:
        """Return a cheap equality token: equal non-empty tokens of one process imply equal traces; ``b""`` means
        "compare the finished traces"."""
        return b""

    @property
    def recorded(self) -> int:
        """Number of recorded ops."""
        return self._position()

    def noted(self) -> dict[str, TensorDigest]:
        """Return the digests of the results so far, by name."""
        self._ledger.read()
        return {name: readable(raw) for name, raw, _ in self._results}

    def finish(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """Return the trace, and notes by record number; release the raw records."""
        self._ledger.read()
        built = self.built()
        self._records.clear()
        self._leaves.clear()
        self._results.clear()
        self._registered = Registered()
        return built

    def built(self) -> tuple[Trace, Mapping[int, Mapping[str, Any]]]:
        """Build the trace so far, and notes by record number."""
        made = self._observer.records()
        early_results = self._collectives.note_early_reads(made, self._observer.kept)
        records, results, notes = self._observer.resolved(made, self._results)
        trace = build_trace(
            records,
            list(self._leaves.values()),
            results,
            marks=tuple(self._setting_marks),
            notes=notes,
            hashed_inputs=self._hashed_inputs,
            first_sequence=self._first_sequence or 0,
            early_results=early_results,
        )
        return trace, notes

    # ----------------------------------------------------------------------------------------------- hot path

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if types:  # subclasses with their own __torch_dispatch__
            if any(map(is_distributed, types)):
                return NotImplemented  # the class then dispatches ops on local tensors
            if has_no_data(*types):  # shape propagation of DTensor, graphs of torch.export
                return func(*args, **(kwargs or {}))
        plan = self._plans.get(id(func)) or self._plan(func)
        if not plan.traced:
            return func(*args, **(kwargs or {}))
        if self._records_nothing:
            return self._call_unrecorded(plan, args, kwargs or {})
        token = self._token
        reads: tuple[Any, ...] = ()  # no list: cold memory is most of a record's cost
        others: Sequence[Any]
        storage: Any = None
        if plan.leading is None:
            reads, others = self._read_each(plan, args)
        else:  # fast path: leading tensors, each marked with its writer
            others = args[len(plan.leading) :]
            for argument in plan.leading:
                value = args[argument]
                try:
                    storage = value.untyped_storage()
                    owner, node, views = storage._hashbench_writer
                    if owner is token and views is None and type(value) in _PLAIN_TENSORS:
                        reads += (argument, node, value.storage_offset())
                        continue
                except (AttributeError, NotImplementedError, RuntimeError):
                    pass  # not a tensor, or without a storage: sparse, nested, opaque
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
        noted = self._observer.before(plan, args, kwargs) if self._observer.wanted or plan.resizes else None
        try:
            output = plan.call(*args, **kwargs)
        except BaseException:
            self.failed_op = plan.name
            raise
        number = self._next_number()
        scalar = None
        written: tuple[RawDigest, ...] = ()
        pattern = plan.pattern if output is not None else _GENERAL  # None may replace any tensor
        try:
            if pattern is _VIEW and self._is_view_of_known(output, storage):
                pass  # half of all calls: a pure view
            elif pattern is _FRESH:
                written = (self._write(output, (token, number, None), plan.blank),)
            elif pattern is _INPLACE:
                written = (self._write(args[0], (token, number, None), False),)
            elif pattern is _SEVERAL and type(output) is tuple:
                mark = (token, number, None)
                # A backward returns None for a gradient that was not requested.
                written = tuple([self._write(tensor, mark, plan.blank) for tensor in output if tensor is not None])
            else:
                if type(output) in PLAIN_TYPES:
                    scalar = output
                written = self._write_all(plan, args, kwargs, output, (token, number, None))
        except _WithoutContentError:
            if self._observer.callback is not None:
                self._observer.take_back()
            return output
        self._records.append(
            (plan, phase, self.iteration, self._modules.current, sequence, reads, others, written, scalar, rng, number)
        )
        if noted is not None:
            self._observer.after(number, plan, args, kwargs, noted)
        return output

    def _call_unrecorded(self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call with the callback around it, without a record."""
        try:
            return plan.call(*args, **kwargs)
        except BaseException:
            self.failed_op = plan.name
            raise

    def _write(self, tensor: torch.Tensor, mark: Mark, blank: bool) -> RawDigest:
        """Hash a tensor just written and mark its storage. A stride of ``None`` means contiguous."""
        dtype = tensor.dtype
        try:
            if type(tensor) in _PLAIN_TENSORS and dtype in self._at_once and tensor.is_cpu and tensor.is_contiguous():
                tensor.untyped_storage()._hashbench_writer = mark  # type: ignore[attr-defined]
                if blank:
                    return dtype, tensor.shape, None, None
                size, address = tensor.nbytes, tensor.data_ptr()
                if not size:
                    return dtype, tensor.shape, None, EMPTY
                if address:
                    value = _hash(_buffer[size](address)) if size <= PIECE else hash_memory(address, size)
                    return dtype, tensor.shape, None, value
        except (NotImplementedError, RuntimeError):
            pass  # no storage or strides: sparse, nested, opaque; no address: zero tensors
        if isinstance(tensor, FakeTensor):
            raise _WithoutContentError
        set_mark(tensor, mark)
        raw = raw_digest(tensor, self._ledger)
        return (*raw[:3], None) if blank else raw

    def _plan(self, func: Any) -> OpPlan:
        plan = plan_of(func)
        if self._observer.callback is not None and plan.traced:
            plan = replace(plan, call=functools.partial(call_with_callback, weakref.ref(self), func, plan))
        self._plans[id(func)] = plan
        return plan

    def _identity(self, plan: OpPlan) -> RecordIdentity:
        """Return the record id of the pending call."""
        node = _current_autograd_node()
        return self._observer.ids.add_record(
            plan.name,
            phase="backward" if node is not None else "optimizer" if self._modules.optimizing else "forward",
            iteration=self.iteration,
            module=self._modules.current,
            sequence=_get_sequence_nr() - 1 if node is None else node._sequence_nr(),
        )

    # --------------------------------------------------------------------------------------- around compiled code

    def _begin_compiled(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Suspend tracing for compiled code: a trace inside would be compiled too, and see only some of its ops."""
        if not self._records_nothing:
            self._read_by_compiled(name, args, kwargs)
        self._suspend()
        self._plans = _NoPlans()

    def _read_by_compiled(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        plan = OpPlan(name="torch.compile", call=_no_op, opaque="compiled code")
        with untraced():
            reads: list[Any] = []
            for path, tensor in arguments.named_arguments(args, kwargs):
                for part in components(tensor) or [tensor]:
                    reads += (path, self._node(plan, path, part), offset(part))
            for kind, label, digest in self._registered.unread():  # it may read and write any of these
                number = self._next_leaf()
                reads += (kind, number, 0)
                self._leaves[number] = kind, label, digest, self._position(), None
                if self._observer.callback is not None:
                    self._observer.ids.add_leaf(kind, label)
            self._registered.close(leaves=self._leaf_count())
            others = [name, *(value for value in args if type(value) in PLAIN_TYPES)]
            others += [(key, value) for key, value in kwargs.items() if type(value) in PLAIN_TYPES]
            noted = self._observer.before(plan, args, kwargs) if self._observer.wanted else None
        self._compiled_call = plan, tuple(reads), tuple(others), noted

    def _end_compiled(self, result: Any) -> None:
        """Resume, with one record for the whole compiled call. Its backward is not recorded either."""
        if not self._records_nothing:
            self._written_by_compiled(result)
        self._plans = _PlansBehindCompiledCode()
        self._resume()

    def _written_by_compiled(self, result: Any) -> None:
        plan, reads, others, noted = self._compiled_call
        number, sequence = self._next_number(), _get_sequence_nr() - 1
        phase, module = "optimizer" if self._modules.optimizing else "forward", self._modules.current
        with untraced():
            mark = (self._token, number, None)
            written = tuple([self._write(tensor, mark, False) for tensor in arguments.tensors_in(result)])
            self._records.append(
                (plan, phase, self.iteration, module, sequence, reads, others, written, None, None, number)
            )
            if self._observer.callback is not None:
                identity = self._observer.ids.add_record(
                    plan.name, phase=phase, iteration=self.iteration, module=module, sequence=sequence
                )
                self._observer.opaque(identity, result)
            if noted is not None:
                self._observer.after(number, plan, (), {}, noted)

    # --------------------------------------------------------------------------- what the hot path seldom needs

    def _write_all(
        self, plan: OpPlan, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, mark: Mark
    ) -> tuple[RawDigest, ...]:
        """Hash everything that a call wrote: fresh outputs first, then written arguments in the schema's order."""
        targets = plan.written_tensors(args, kwargs) if plan.shown is None else [output[plan.shown]]
        seen = {id(tensor) for tensor in targets}
        fresh = [
            tensor
            for tensor in arguments.tensors_in(output)
            if id(tensor) not in seen and (plan.fresh or not self._is_marked(tensor))
        ]
        if plan.collective:
            once = plan.receives_once
            return self._collectives.begin(mark[1], [*fresh, *targets], output, receives_once=once)
        return tuple([self._write(tensor, mark, plan.blank) for tensor in fresh + targets])

    def _is_view_of_known(self, tensor: torch.Tensor, storage: Any) -> bool:
        """Return True if a view shares ``storage`` (the last-read argument's), or any other storage known to this
        trace."""
        try:
            return tensor.untyped_storage() is storage or self._is_marked(tensor)
        except (NotImplementedError, RuntimeError):
            return self._is_marked(tensor)

    def _is_marked(self, tensor: torch.Tensor) -> bool:
        if is_distributed(type(tensor)):
            (tensor,) = components(tensor)
        try:
            marked: bool = tensor.untyped_storage()._hashbench_writer[0] is self._token  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError, RuntimeError):
            mark = get_mark(tensor) if isinstance(tensor, _Tensor) else None
            return mark is not None and mark[0] is self._token
        return marked

    def _read_each(self, plan: OpPlan, args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split positional args into reads (flat argument, writer, offset) and non-tensor values."""
        reads: list[Any] = []
        others: list[Any] = []
        if plan.group:
            args = [GROUP if argument in plan.group else value for argument, value in enumerate(args)]
        for argument, value in enumerate(args):
            kind = type(value)
            if kind in _PLAIN_TENSORS:
                try:
                    storage = value.untyped_storage()
                    owner, node, views = storage._hashbench_writer
                    if owner is not self._token and value.nbytes >= storage.nbytes() and value.is_contiguous():
                        owner, node, views = self._token, self._new_leaf(value, None), None
                    if owner is self._token and views is None:
                        reads += (argument, node, value.storage_offset())
                        continue
                except (NotImplementedError, RuntimeError):
                    pass  # without a storage: sparse, nested, opaque
                self._read(plan, argument, value, reads, others)
            elif kind in PLAIN_TYPES or (kind is list and value and type(value[0]) is int):
                others.append(value)  # no schema mixes tensors with sizes in a list
            else:
                self._read(plan, argument, value, reads, others)
        return tuple(reads), tuple(others)

    def _read_named(self, plan: OpPlan, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split keyword arguments likewise; non-tensor values keep their names."""
        reads: list[Any] = []
        others: list[Any] = []
        for name, value in kwargs.items():
            if type(value) in PLAIN_TYPES or name in plan.group:
                others.append((name, GROUP if name in plan.group else value))
            else:
                self._read(plan, name, value, reads, others)
        return tuple(reads), tuple(others)

    def _read(self, plan: OpPlan, argument: int | str, value: Any, reads: list[Any], others: list[Any]) -> None:
        """Record one argument off the fast path: a leaf, a list, an odd tensor, or any other object."""
        if isinstance(value, torch.Tensor):
            for part in components(value) or [value]:
                reads += (argument, self._node(plan, argument, part), offset(part))
            if value.is_complex() and value.is_conj():
                others.append(("conj", argument))
            return
        plain = value
        if isinstance(value, (list, tuple)):
            plain = []
            for index, item in enumerate(value):
                nested = isinstance(item, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in item)
                if nested or isinstance(item, torch.Tensor):  # all-gather: tensors by rank
                    self._read(plan, f"{argument}.{index}", item, reads, others)
                else:
                    plain.append(item)
            if value and not plain:
                return
        others.append((argument, plain) if isinstance(argument, str) else plain)

    def _node(self, plan: OpPlan, argument: int | str, tensor: torch.Tensor) -> int:
        """Return the number of the record or leaf that last wrote this tensor; an unknown tensor becomes a leaf."""
        mark = get_mark(tensor)
        if mark is not None and mark[0] is not self._token:
            mark = None
        if mark is not None and not isinstance(mark[2], dict):
            if mark[2] is IN_FLIGHT and (
                plan.fresh or plan.writes_arguments or plan.waits
            ):  # else it only makes a view
                self._collectives.read(mark[1], tensor, position=self._position(), by=plan)
            return mark[1]
        view = view_key(tensor)
        views: LeafViews | None = mark[2] if mark is not None and isinstance(mark[2], dict) else None
        if views is None and not covers_storage(tensor):
            views = {}
        if views is not None and plan.writes(argument):  # the rest was never read, and is no leaf after the write
            return self._new_leaf(tensor, None, content=whole_storage(tensor))
        if views is not None and view in views:
            return views[view]
        return self._new_leaf(tensor, views)

    def _state_name(self, tensor: torch.Tensor) -> tuple[str, str]:
        """Return ``("parameter" | "buffer", path)`` for the state of a known module, else two empty strings."""
        number = self._state.get(id(tensor))
        if number is None or not self._modules.is_state(number, tensor):
            return "", ""
        kind, path, attribute = self._modules.state(number)
        return kind, f"{path}.{attribute}"

    def _storage_key(self, tensor: torch.Tensor) -> int:
        return storage_key(tensor) or 0

    def _new_leaf(self, tensor: torch.Tensor, views: LeafViews | None, *, content: torch.Tensor | None = None) -> int:
        """Hash and name a tensor that no op of this trace wrote, and mark its storage with the new leaf's number."""
        with self._leaf_lock:
            number = self._next_leaf()
            self._add_leaf(number, tensor, views, content)
            return number

    def _add_leaf(
        self, number: int, tensor: torch.Tensor, views: LeafViews | None, content: torch.Tensor | None
    ) -> None:
        kind, name = self._state_name(tensor)
        kind, name, initial = self._registered.read(self._storage_key(tensor)) or (kind, name, None)
        if not kind:
            kind = "parameter" if is_parameter(tensor) else "other"
            name = self._modules.current
        if self._observer.callback is not None:
            leaf_id = self._observer.ids.add_leaf(kind, name)
            with unrecorded():
                self._observer.callback.leaf(leaf_id, tensor if content is None else content)
        if views is None and (content is not None or is_whole(tensor)):
            digest = self._write(tensor if content is None else content, (self._token, number, None), blank=False)
        else:
            if views is not None:
                views[view_key(tensor)] = number
            set_mark(tensor, (self._token, number, views))
            digest = raw_digest(tensor, self._ledger)
        seen = digest if content is None else raw_digest(tensor, self._ledger)
        registered = None if initial is None else (initial, seen)
        self._leaves[number] = kind, name, digest, self._position(), registered


def call_with_callback(
    tracer: Callable[[], TracingMode | None], func: Any, plan: OpPlan, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a call with the caller's callback around it. ``tracer`` is a weak reference: this function is part of the
    plans that records keep, which must not keep the trace alive."""
    made = tracer()
    assert made is not None
    return made._observer.call(func, plan, made._identity(plan), args, kwargs)


skip_frames(TracingMode.__torch_dispatch__)
