"""Raw form of a trace in the making: what its records share, whichever tracer makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hashbench.core.devices.ledger import Ledger
from hashbench.core.records import PENDING, SettingsMark, TensorDigest, Trace
from hashbench.core.trace import arguments
from hashbench.core.trace.build import IndexedTrace, RawRecord, RawResult, build_trace
from hashbench.core.trace.callbacks import CallObserver, TraceOptions
from hashbench.core.trace.collectives import Collectives
from hashbench.core.trace.digest import (
    BY_DTYPE,
    EMPTY,
    PIECE,
    RawDigest,
    _buffer,
    _hash,
    components,
    hash_memory,
    local_tensor,
    python_digest,
    raw_digest,
    readable,
    untraced,
)
from hashbench.core.trace.module_paths import ModuleListener, ModulePaths, NamedState
from hashbench.core.trace.nodes import Nodes, own_mark
from hashbench.core.trace.placements import NOT_PLACED, Placements
from hashbench.core.trace.registered import Registered
from hashbench.core.trace.segments import TraceSegments
from hashbench.core.trace.storage_writers import IN_FLIGHT, Mark, set_mark, storage_key, view_key

PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_PLAIN_DTYPES = frozenset(dtype for name, dtype in _DTYPES.items() if not name.startswith("q")) - BY_DTYPE.keys()

_get_sequence_nr = torch._C._autograd._get_sequence_nr


class WithoutContentError(Exception):
    """An op returned a fake tensor: nothing was computed, and no record is made."""


class RawTrace(ModuleListener):
    """Records, leaves, results and settings marks of one trace, with the iteration and modules that they belong to.

    Both tracers hold one: calls add to it (``calls.CallRecorder``), and :meth:`built` turns it into a
    :class:`~hashbench.core.records.Trace`.

    Attributes:
        iteration: written into every record: set by the caller, or by default the number of steps so far (``steps``).
        failed_op: name of the op that raised last.
        active: whether ops are being recorded.
        first_sequence: autograd's sequence number at the start.
        after_step: called after each step of an optimizer, once it is counted.
    """

    def __init__(self, options: TraceOptions, nodes: Nodes, modules: ModulePaths) -> None:
        self.iteration: int | None = None
        self.failed_op = ""
        self.active = False
        self.first_sequence: int | None = None
        self.nodes, self.modules = nodes, modules
        self.ledger = Ledger(everywhere=options.digests == "device")
        self.observer = CallObserver(options, nodes.token, self.ledger, nodes.records)
        self.collectives = Collectives(nodes.token, self.ledger)
        self.placements = Placements(self.collectives.groups, modules.known, nodes.record_count)
        self.registered = Registered()
        self.results: list[RawResult] = []
        self.after_step: Callable[[torch.optim.Optimizer], None] | None = None
        self.setting_marks: list[SettingsMark] = []
        self.records_nothing = options.records_nothing
        self.hashed_inputs = options.hash_inputs
        self._at_once = frozenset() if self.ledger.everywhere else _PLAIN_DTYPES
        self._clocked = True

    def start(self) -> None:
        """Follow modules and optimizers until :meth:`stop`."""
        if self.first_sequence is None:
            self.first_sequence = self.observer.ids.first_sequence = _get_sequence_nr()
        self.active = True
        self.modules.start(self)

    def stop(self) -> None:
        self.active = False
        self.modules.stop()

    def finish_collectives(self) -> None:
        """Hash the outputs of collectives that were never read: later code may overwrite them."""
        if self.collectives.under_way:
            with untraced():
                self.collectives.finish()

    def settle(self) -> None:
        """Hash the outputs of collectives that are known to be done; wait for none."""
        if self.collectives.under_way:
            with untraced():
                self.collectives.settle()

    # --------------------------------------------------------------------------------------------- iterations

    def begin_iteration(self, number: int | None = None) -> None:
        """Begin iteration ``number`` (default: the next one). Steps of optimizers are no longer counted."""
        if number is None:
            number = 1 if self._clocked or self.iteration is None else self.iteration + 1
        self._clocked, self.iteration = False, number
        self.changed()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step; see ``steps``."""
        if self._clocked:
            self.iteration = self.modules.clock.count(optimizer)
            self.changed()
        if self.after_step is not None:
            self.after_step(optimizer)

    def changed(self) -> None:
        """Start a context range: the iteration changed, or an optimizer step begins or ends."""
        self.modules.begin(self.iteration)

    # ------------------------------------------------------------------------- what the caller names and notes

    def named(self, state: NamedState) -> None:
        self.nodes.name(state)

    def register_model(self, model: torch.nn.Module) -> None:
        """Name the modules, parameters and buffers of a model, and hash its state now."""
        with untraced(), torch._C.DisableTorchFunction():  # lazy parameters raise for shape
            found = self.modules.register(model)
            self.nodes.name(found)
            if self.records_nothing:
                return
            numbers = found.numbers()
            for tensor in [*model.parameters(), *model.buffers()]:
                if local_tensor(tensor) not in self.registered:
                    self._register(tensor, *self.state_name(numbers.get(id(tensor), -1)))

    def register_inputs(self, inputs: Any) -> None:
        """Name the tensors in ``inputs`` by their path, and hash them now."""
        if self.records_nothing:
            return
        with untraced():
            for path, tensor in arguments.named_tensors(inputs):
                self._register(tensor, "input", path)

    def state_name(self, number: int) -> tuple[str, str]:
        """Return ``("parameter" | "buffer", path)`` of the state of a known module; two empty strings if negative."""
        if number < 0:
            return "", ""
        kind, path, attribute = self.modules.state(number)
        return kind, f"{path}.{attribute}"

    def _register(self, tensor: torch.Tensor, kind: str, name: str) -> None:
        tensor = local_tensor(tensor)
        if storage_key(tensor) is not None:
            if self.observer.callback is not None:
                self.observer.callback.leaf(f"{kind}/{name}", tensor)
            registration = kind, name, raw_digest(tensor, self.ledger)
            self.registered.add(tensor, registration, leaves=self.nodes.leaf_count())

    def mark(self, label: str, settings: Mapping[str, str]) -> None:
        """Add torch's global settings at this point of the run."""
        position = self.nodes.record_count()
        self.setting_marks.append(SettingsMark(position, label, tuple(sorted(settings.items()))))

    def add_result(self, name: str, value: Any) -> None:
        """Add a result by which runs are compared, hashed now: a tensor, or a plain Python value.

        A collective that still writes the tensor is waited for.
        """
        self.add_results([(name, value)])

    def add_results(self, named: Iterable[tuple[str, Any]], *, wait: bool = True) -> None:
        """Add results by name, as :meth:`add_result`. Without ``wait``, the digest of a tensor that a collective still
        writes is ``pending``."""
        if self.records_nothing:
            return
        with untraced():
            for name, value in named:
                if isinstance(value, torch.Tensor):
                    self._add_tensor(name, value, wait=wait)
                else:
                    self.results.append(((name, NOT_PLACED), python_digest(value), None))

    def _add_tensor(self, name: str, value: torch.Tensor, *, wait: bool) -> None:
        label = name, self.placements.of(value)
        value = local_tensor(value)
        self.nodes.pull((value,))
        mark, node = own_mark((components(value) or [value])[0], self.nodes.token), None
        if mark is not None:
            node = mark[1]
            if mark[2] is IN_FLIGHT and not wait and self.collectives.is_in_flight(node):
                self.results.append((label, (value.dtype, tuple(value.shape), None, PENDING), node))
                return
            if mark[2] is IN_FLIGHT:
                self.collectives.read(node, value, position=self.nodes.record_count(), result=name)
            elif isinstance(mark[2], dict):
                node = mark[2].get(view_key(value), node)
        self.results.append((label, raw_digest(value, self.ledger), node))

    # ------------------------------------------------------------------------------------------------ digests

    def write(self, tensor: torch.Tensor, mark: Mark, blank: bool) -> RawDigest:
        """Hash a tensor just written (unless ``blank``) and mark its storage. A stride of ``None`` means contiguous.

        Raises:
            WithoutContentError: the tensor is fake.
        """
        dtype = tensor.dtype
        try:
            if type(tensor) in PLAIN_TENSORS and dtype in self._at_once and tensor.is_cpu and tensor.is_contiguous():
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
            raise WithoutContentError
        set_mark(tensor, mark)
        raw = raw_digest(tensor, self.ledger)
        return (*raw[:3], None) if blank else raw

    def noted(self) -> dict[str, TensorDigest]:
        """Return the digests of the results so far, by name."""
        self.ledger.read()
        return {name: readable(raw) for (name, _), raw, _ in self.results}

    # --------------------------------------------------------------------------------------------- the finished trace

    def made(self) -> tuple[list[RawRecord], dict[str, str]]:
        """Return the records made in Python, in any order, and the source lines of results that were read early."""
        records = self.observer.records()
        return records, self.collectives.note_early_reads(records, self.observer.kept)

    def segments(self, *, hashed_inputs: bool) -> TraceSegments:
        """Return the segments of this trace, none so far."""
        return TraceSegments(self.first_sequence or 0, hashed_inputs=hashed_inputs)

    def new_records(self, segments: TraceSegments) -> tuple[list[RawRecord], dict[str, str]]:
        """Return what :meth:`made` does, without what ``segments`` have."""
        self.settle()
        self.ledger.read()
        records = self.observer.records(segments.made)
        return records, self.collectives.note_early_reads(records, self.observer.kept, once=True)

    def built(self, indexed: IndexedTrace, early_results: Mapping[str, str], *, hashed_inputs: bool) -> Trace:
        """Build the trace from records, leaves and results whose numbers are indices."""
        first = self.first_sequence or 0
        return build_trace(indexed, early_results, first_sequence=first, hashed_inputs=hashed_inputs)

    def clear(self) -> None:
        """Release records, leaves, results and names once they are part of a trace."""
        self.nodes.records.clear()
        self.nodes.leaves.clear()
        self.results.clear()
        self.registered = Registered()
