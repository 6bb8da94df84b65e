"""Record one run of one implementation as a graph of contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hashbench.core.divergence.content import EXACT, ContentGraph, ContentNode, Kind
from hashbench.core.divergence.content_sums import DATA
from hashbench.core.errors import named_line
from hashbench.core.records import OpRecord, Trace
from hashbench.core.run.wide import WIDER, WideMode, default_dtype, tolerance_of
from hashbench.core.text import in_brackets
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import generator_digest, mapped, raising_line, tensors_in
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import has_no_data, local_tensor, unobserved
from hashbench.core.trace.op_schema import Pattern, plan_of
from hashbench.core.trace.storage_writers import covers_storage, view_key
from hashbench.extensions.implementations.pair.moments import additive_digest, measure

OVERWRITES = frozenset({"aten.copy_", "aten.fill_", "aten.zero_"})
"""Ops that read nothing of the tensor that they write; in-place draws likewise."""

COPIES = frozenset(
    {
        # Ops whose results hold elements of what they read and no others; views are found by their schema.
        "aten._to_copy",
        "aten._unsafe_view",
        "aten._reshape_copy",
        "aten.cat",
        "aten.stack",
        "aten.clone",
        "aten.contiguous",
        "aten.copy",
        "aten.copy_",
        "aten.constant_pad_nd",
        "aten.embedding",
        "aten.flip",
        "aten.gather",
        "aten.index",
        "aten.index_put",
        "aten.index_put_",
        "aten.index_select",
        "aten.lift_fresh",
        "aten.masked_select",
        "aten.new_zeros",
        "aten.repeat",
        "aten.roll",
        "aten.select_scatter",
        "aten.slice_backward",
        "aten.select_backward",
        "aten.slice_scatter",
        "aten.take",
    }
)


@dataclass(frozen=True, slots=True)
class NodeOrigin:
    """Where a node came from.

    Attributes:
        record: id of its record, or of the leaf.
        index: of the output.
        text: dtype and shape, ``float32[2, 11]``.
        partial: only added up over ranks, element by element, it is what the other side has.
    """

    record: str
    index: int
    text: str
    partial: bool = False


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run.

    Attributes:
        graph: what its ops left.
        outputs: origin of each node.
        trace: records of its ops.
        results: compared values by name, on the CPU.
        digests: additive digests by node; empty of a run in float64.
        values: values of the nodes that were asked for.
        calls: calls that wrote these, by record.
        parameters: names of the leaves that are parameters.
        fallbacks: calls of each op that was computed in a lower dtype.
        rebuilt: of a model that was built anew in float64.
        parts: results of each rank, of a run of several.
        sums: what was asked for and differs between ranks, added up over them.
    """

    graph: ContentGraph
    outputs: Mapping[str, NodeOrigin]
    trace: Trace
    results: Mapping[str, torch.Tensor]
    digests: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    calls: Mapping[str, KeptCall] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    rebuilt: bool = False
    parts: tuple[Mapping[str, torch.Tensor], ...] = ()
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def record_of(self, node: str) -> OpRecord | None:
        """Return the record of a node; ``None`` of a leaf."""
        wanted = self.outputs[node].record
        return next((record for record in self.trace.records if record.id == wanted), None)

    def place(self, node: str) -> str:
        """Return ``op in module``; the name of a leaf."""
        record = self.record_of(node)
        if record is None:
            return node
        return f"{record.op} in {record.module}" if record.module else record.op


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call of an op, with copies of its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def outputs(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """Call it again with its tensors ``moved``, and return what it returns and writes, in the order of nodes."""
        args, kwargs = mapped([self.args, dict(self.kwargs)], lambda leaf: _moved(leaf, moved))
        output = self.func(*args, **kwargs)
        return _outputs(plan_of(self.func).written_tensors(args, kwargs), output)


def _moved(leaf: Any, moved: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return moved(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _outputs(written: Sequence[torch.Tensor], output: Any) -> list[torch.Tensor]:
    known = {id(tensor) for tensor in written}
    return [*(tensor for tensor in tensors_in(output) if id(tensor) not in known), *written]


class SideRunError(Exception):
    """A model raised, in an op or elsewhere."""

    def __init__(self, error: Exception, op: str) -> None:
        place = " in ".join(part for part in (op, raising_line(error)) if part)
        super().__init__(f"{named_line(error)}{in_brackets(place)}")


class _StorageContents:
    """What the views of one storage hold: nodes by view, and the nodes that wrote it."""

    __slots__ = ("owner", "views", "writers")

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.views: dict[tuple[Any, ...], str] = {}
        self.writers: list[str] = []


class ContentRecorder(TraceCallback):
    """Make a graph of contents of the ops under a trace."""

    def __init__(
        self,
        wide: WideMode | None,
        *,
        keep: Iterable[str] = (),
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.nodes: dict[str, ContentNode] = {}
        self.outputs: dict[str, NodeOrigin] = {}
        self.digests: dict[str, int] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.calls: dict[str, KeptCall] = {}
        self._wide, self._keep, self._given = wide, frozenset(keep), given or {}
        self._kept_calls = {name.rpartition(":")[0] for name in self._keep}
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._drawn_from = 0
        self._largest: dict[str, float] = {}
        self._reads: list[str] = []
        self._token = object()
        self._constants = 0
        self._under_way: dict[str, torch.Tensor] = {}
        self._operands: dict[str, float] = {}

    # ------------------------------------------------------------------------------------------------- leaves

    def register(self, kind: Kind, name: str, tensor: torch.Tensor) -> None:
        """Add a leaf before the run."""
        tensor = local_tensor(tensor)
        contents = self._contents(tensor)
        if contents is not None and view_key(tensor) in contents.views:
            return  # tied
        self._add(name, "", kind, tensor, (), copies=False)

    # -------------------------------------------------------------------------------------------------- calls

    def before(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Find what the call reads before it may write it."""
        plan = plan_of(func)
        overwritten: set[int] = set()
        if plan.writes_arguments:
            all_of_them = plan.seeded or _without_overload(func) in OVERWRITES
            written = plan.written_tensors(args, kwargs) if all_of_them else plan.written_tensors((), kwargs)
            overwritten = {id(tensor) for tensor in written}
        read: Any = [args, kwargs]
        if plan.collective is not None:
            read = [value for _, value in plan.collective.contributed(args, kwargs, is_root=True)]
        tensors = [tensor for tensor in tensors_in(read) if id(tensor) not in overwritten]
        self._reads = [self.read(tensor, arrived=not plan.waits) for tensor in tensors]
        if plan.seeded:
            self._drawn_from = generator_digest(args, kwargs)
        if node in self._kept_calls:
            self.calls[node] = KeptCall(func, *mapped([tuple(args), dict(kwargs)], lambda leaf: _moved(leaf, _copy)))

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Add a node for each tensor that the call returned or wrote."""
        if any(has_no_data(type(tensor)) for tensor in tensors_in(output)):
            return  # shape propagation of DTensor
        plan = plan_of(func)
        if plan.waits:
            self._arrived(self._reads)
        written = plan.written_tensors(args, kwargs)
        known = {id(tensor) for tensor in written}
        reads = tuple(dict.fromkeys(self._reads))
        fresh = {id(tensor) for tensor in plan.written_by(args, kwargs, output)}
        copies = plan.pattern is Pattern.VIEW or _without_overload(func) in COPIES
        drawn = plan.seeded and generator_digest(args, kwargs) != self._drawn_from
        for index, tensor in enumerate(_outputs(written, output)):
            is_view = id(tensor) not in fresh
            name = f"{node}:{index}"
            if not is_view:
                self._forget_views(tensor, in_place=id(tensor) in known)
            kind = Kind.RANDOM if drawn and not is_view else self._kind(reads)
            origin = NodeOrigin(node, index, _text(tensor))
            if plan.collective is not None:  # of other ranks' data, which may arrive later
                kind, self._under_way[name] = Kind.COMPUTED, tensor
            self._add(name, str(func), kind, tensor, reads, copies=copies or is_view, origin=origin)
            contents = self._contents(tensor)
            if contents is not None and not is_view:
                contents.writers.append(name)
            if plan.blank:
                self.nodes[name] = replace(self.nodes[name], moments=None, rows=None, numel=0)

    def read(self, tensor: torch.Tensor, *, arrived: bool = True) -> str:
        """Return the node of what a tensor holds now; a new one if only a part of what was written is read.

        What a collective writes is measured at its first read: ``arrived`` is false before a wait for it.
        """
        contents = self._contents(tensor)
        if contents is None:
            return self._constant(tensor)
        found = contents.views.get(view_key(tensor))
        if found is not None:
            if arrived:
                self._arrived([found])
            return found
        if not contents.writers:
            return self._constant(tensor)
        reads = tuple(contents.writers)
        self._arrived(reads)
        return self._add(f"part/{len(self.nodes)}", "", self._kind(reads), tensor, reads, copies=True)

    # ------------------------------------------------------------------------------------------------- helpers

    def _arrived(self, nodes: Iterable[str]) -> None:
        """Keep what collectives have written."""
        for name in nodes:
            if (tensor := self._under_way.pop(name, None)) is not None:
                self.nodes[name] = self._kept(self.nodes[name], tensor)

    def _constant(self, tensor: torch.Tensor) -> str:
        """Add a tensor that no recorded op wrote and nobody registered."""
        self._constants += 1
        return self._add(f"constant/{self._constants}", "", Kind.CONSTANT, tensor, (), copies=False)

    def _contents(self, tensor: torch.Tensor) -> _StorageContents | None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        found = getattr(storage, "_hashbench_contents", None)
        if found is None or found.owner is not self._token:
            found = _StorageContents(self._token)
            storage._hashbench_contents = found  # type: ignore[attr-defined]
        return found

    def _kept(self, node: ContentNode, tensor: torch.Tensor) -> ContentNode:
        """Keep what is asked for of a tensor; return the node with its moments."""
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return node
        if node.id in self._keep:
            self.values[node.id] = tensor.detach().cpu().clone()
        if self._keep:
            return node
        if self._wide is None:
            self.digests[node.id] = additive_digest(tensor)
            return node
        return self._measured(node, tensor)

    def _measured(self, node: ContentNode, tensor: torch.Tensor) -> ContentNode:
        """Return the node with the moments of its tensor."""
        before = self.nodes[node.reads[0]] if node.copies and len(node.reads) == 1 else None
        if before is not None and node.kind is Kind.CONSTANT and before.moments and before.numel == node.numel:
            self._largest[node.id], self._operands[node.id] = self._largest[before.id], 0.0
            return replace(node, moments=before.moments)  # a weight that is transposed for each use
        known = self._operands if node.copies else self._largest
        operands = max((known.get(read, 0.0) for read in node.reads), default=0.0)
        found = measure(tensor, operands=operands, rows=node.kind in (Kind.INPUT, Kind.COMPUTED))
        self._largest[node.id], self._operands[node.id] = found.largest, operands
        return replace(node, moments=found.moments, rows=found.rows, ordered=found.ordered)

    def _forget_views(self, tensor: torch.Tensor, *, in_place: bool) -> None:
        contents = self._contents(tensor)
        if contents is None:
            return
        contents.views.clear()
        if not in_place or covers_storage(tensor):
            contents.writers.clear()

    def _kind(self, reads: Iterable[str]) -> Kind:
        return Kind.COMPUTED if any(self.nodes[read].kind in DATA for read in reads) else Kind.CONSTANT

    def _add(
        self,
        name: str,
        op: str,
        kind: Kind,
        tensor: torch.Tensor,
        reads: tuple[str, ...],
        *,
        copies: bool,
        origin: NodeOrigin | None = None,
    ) -> str:
        tolerance = max([self.nodes[read].tolerance for read in reads], default=EXACT)
        if self._wide is not None and op:
            tolerance = max(tolerance, self._wide.tolerance, tolerance_of(tensor.dtype) if tensor.dtype in WIDER else 0)
        if name in self._given:
            self._replace(tensor, self._given[name], restored=not op)
        node = ContentNode(name, op, kind, None, reads, copies, tolerance, tensor.numel(), shape=tuple(tensor.shape))
        self.nodes[name] = node if name in self._under_way else self._kept(node, tensor)
        self.outputs[name] = origin or NodeOrigin(name, 0, _text(tensor))
        contents = self._contents(tensor)
        if contents is not None:
            contents.views[view_key(tensor)] = name
            if not op and not reads:
                contents.writers.append(name)
        return name

    def _replace(self, tensor: torch.Tensor, value: torch.Tensor, *, restored: bool) -> None:
        """Overwrite a tensor; one that no op wrote may be the caller's, and is restored by :meth:`restore`."""
        if restored:
            self._replaced.append((tensor, tensor.detach().clone()))
        with unobserved(), torch.no_grad():
            tensor.detach().copy_(value.reshape(tensor.shape))

    def restore(self) -> None:
        """Put back what was overwritten and that no op of the run wrote."""
        with unobserved(), torch.no_grad():
            while self._replaced:
                tensor, value = self._replaced.pop()
                tensor.detach().copy_(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a result on the CPU, dense and not quantized; one without data as it is."""
    if tensor.is_meta:
        return tensor.detach()
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return (dense.dequantize() if dense.is_quantized else dense).cpu()


def _without_overload(func: Any) -> str:
    return str(func).rpartition(".")[0]


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def record_run(
    run: Callable[[], Mapping[str, torch.Tensor]],
    leaves: Iterable[tuple[Kind, str, torch.Tensor]],
    *,
    model: torch.nn.Module | None,
    wide: bool,
    keep: Iterable[str] = (),
    given: Mapping[str, torch.Tensor] | None = None,
) -> RecordedRun:
    """Record a run.

    Args:
        run: runs the model and returns the results to compare, by name.
        leaves: parameters, buffers and inputs.
        model: whose modules name the ops.
        wide: compute in float64, and keep moments; otherwise keep digests.
        keep: ids of nodes whose values are kept, and the calls that wrote them: then no moments or digests are.
        given: contents that replace those of nodes as they are written, of any shape with as many elements.

    Raises:
        SideRunError: the model raised.
    """
    mode = WideMode() if wide else None
    recorder = ContentRecorder(mode, keep=keep, given=given)
    leaves = tuple(leaves)
    trace = HashDebugTrace(model=model, watcher=recorder, tracer="python", source_lines=True)
    try:
        for kind, name, tensor in leaves:
            recorder.register(kind, name, tensor)
        with ExitStack() as stack:
            stack.enter_context(trace)
            if mode is not None:
                stack.enter_context(default_dtype(torch.float64))
                stack.enter_context(mode)
            results = {name: local_tensor(tensor) for name, tensor in run().items()}
            with unobserved():
                named = {name: recorder.read(tensor) for name, tensor in results.items()}
    except Exception as error:
        raise SideRunError(error, mode.failed_op(error) if mode is not None else "") from error
    finally:
        recorder.restore()
    finished = trace.finish()
    scalars = {record.id: record.arguments for record in finished.records}
    nodes = {
        name: replace(node, scalars=scalars.get(recorder.outputs[name].record, ""))
        for name, node in recorder.nodes.items()
    }
    if not any(nodes[node].kind is Kind.COMPUTED for node in named.values()):
        nodes = _as_data(nodes)
    return RecordedRun(
        ContentGraph(nodes, named),
        recorder.outputs,
        finished,
        {name: _plain(tensor) for name, tensor in results.items()},
        recorder.digests,
        recorder.values,
        recorder.calls,
        frozenset(name for _, name, tensor in leaves if isinstance(tensor, torch.nn.Parameter)),
        dict(mode.fallbacks) if mode is not None else {},
    )


def _as_data(nodes: Mapping[str, ContentNode]) -> dict[str, ContentNode]:
    """Take constants for inputs, of a program that was given none."""
    computed = {Kind.CONSTANT: Kind.COMPUTED}
    return {
        name: replace(node, kind=computed.get(node.kind, node.kind) if node.op else Kind.INPUT)
        if node.kind is Kind.CONSTANT and not (node.op and not node.reads)
        else node
        for name, node in nodes.items()
    }
