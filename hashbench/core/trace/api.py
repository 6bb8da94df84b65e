"""``HashDebugTrace``: record every torch op of a block of code, with digests of its outputs.

::

    with HashDebugTrace(model=model, inputs=x) as trace:
        model(x)
    trace.save("run.trace.gz")

    op  forward:-/Net.fc/aten.addmm.default#0  0=parameter/Net.fc.bias:42c7a0d9 …  -> float32[4,2]:f6ff5b52e9d2e5d4

Not traced: kernels inside a fused op; with the Python tracer, ops inside a custom op (one record for the whole op) and
Python threads that the program starts (autograd's own threads are traced); with the native tracer, Python threads older
than the trace; work that an extension does without the dispatcher; writes outside the dispatcher (a NumPy view), unless
``hash_inputs`` is set; ops in compiled code, where one call is one record.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.io import replace_file
from hashbench.core.records import OpRecord, Ref, TensorDigest, Trace
from hashbench.core.trace import file, native
from hashbench.core.trace.callbacks import TraceCallback, TraceOptions
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.mode import TracingMode, is_tracing
from hashbench.core.trace.native.tracer import NativeTracer
from hashbench.core.trace.settings import in_force
from hashbench.core.trace.tracer import choose


class HashDebugTrace:
    """Record every op dispatched between ``__enter__`` and ``__exit__``, with digests of everything it wrote.

    ``with HashDebugTrace() as trace:`` alone is enough; afterwards ``trace.finish()`` returns a
    :class:`~hashbench.core.records.Trace`, and ``trace.save(path)`` writes it as text made for ``diff -u``. Tracing
    does not change results: it draws no random numbers, keeps no tensor alive and, on the CPU, adds no synchronization.

    Args:
        log_path: write the text form to this file on exit (gzip-compressed if the name ends in ``.gz``). Default: no
            file.
        verbose: print each record as it is made.
        max_ops_logged: limit on printed records (``verbose``). A log file is always complete.
        include_timestamp: append the time of each call to its line in the log, in seconds since the epoch. ``hashbench
            diff`` ignores such notes; ``diff -u`` does not.
        show_exec_time: append the run time of each op to its line, in seconds; see ``include_timestamp``.
        hash_inputs: also hash every tensor just before an op reads it, which exposes writes that bypassed the
            dispatcher, and just after, which exposes writes that the op's schema does not declare.
        source_lines: record the line of the caller's code for every op.
        model: name the modules, parameters and buffers of this model from the start, and hash its state on
            construction.
        inputs: hash these example inputs (any nesting of tensors) on construction and name them ``input/…``.
        settings: function that returns torch's global settings as text by name; called at every mark. Default: those,
            with threads, instruction set and variables that decide how libraries compute, when the trace begins.
        watcher: callback called around every op with the id of its record; it may inspect, capture, and overwrite
            contents.
        digests: ``"fast"`` (the fastest hash function on each device) or ``"device"`` (the accelerators' function
            everywhere).
        tracer: ``"native"``, ``"python"`` (the dispatch mode), or ``"auto"`` (native if available, else Python). The
            attribute ``tracer`` is the one in use, and ``tracer_reason`` says why ``auto`` fell back to Python.

    Raises:
        HashbenchError: ``tracer="native"``, and the native tracer is unavailable.
    """

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
        watcher: TraceCallback | None = None,
        digests: str = "fast",
        tracer: str = "auto",
    ) -> None:
        self._choice = choose(tracer)
        self.log_path = None if log_path is None else Path(log_path)
        options = TraceOptions(
            verbose=verbose,
            max_ops_logged=max_ops_logged,
            include_timestamp=include_timestamp,
            show_exec_time=show_exec_time,
            hash_inputs=hash_inputs,
            source_lines=source_lines,
            callback=watcher,
            digests=digests,
        )
        self._tracer: TracingMode | NativeTracer = (
            TracingMode(options) if self._choice.tracer == "python" else native.make_tracer(options)
        )
        self._settings = settings
        self._finished: Trace | None = None
        self._notes: Mapping[int, Mapping[str, Any]] = {}
        if model is not None:
            self._tracer.raw.register_model(model)
        if inputs is not None:
            self._tracer.raw.register_inputs(inputs)

    # ----------------------------------------------------------------------------------------------- recording

    def __enter__(self) -> Self:
        if self._finished is not None:
            raise HashbenchError(
                "cannot re-enter a finished trace",
                consequence="its records are closed, so new ones would be lost",
                tip="Create a new HashDebugTrace for every run.",
            )
        refuse_nested()
        if self._settings is None:
            self._tracer.raw.mark("start", in_force())
        self.mark("start")
        self._tracer.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tracer.__exit__(*exception)
        self.mark("end")
        if self.log_path is not None:
            self.save(self.log_path)

    @property
    def tracer(self) -> str:
        """The tracer in use: ``native`` or ``python``."""
        return self._choice.tracer

    @property
    def tracer_reason(self) -> str:
        """Why ``auto`` fell back to the Python tracer; ``""`` otherwise."""
        return self._choice.reason

    def is_active(self) -> bool:
        """Return True if ops are being recorded."""
        return self._tracer.raw.active

    @property
    def iteration(self) -> int | None:
        """Iteration number written into every record. Set it at the start of each iteration, or call :meth:`step` at
        its end. By default it counts the steps of the most frequently stepped optimizer, and is ``None`` before the
        first."""
        return self._tracer.raw.iteration

    @iteration.setter
    def iteration(self, number: int) -> None:
        self._tracer.raw.begin_iteration(number)

    def step(self) -> None:
        """End an iteration: later records belong to the next one. Once called, steps of optimizers are no longer
        counted."""
        self._tracer.raw.begin_iteration()

    @property
    def failed_op(self) -> str:
        """Name of the op that raised last; ``""`` if none did."""
        return self._tracer.raw.failed_op

    def mark(self, label: str) -> None:
        """Record torch's global settings at this point of the run. No effect unless ``settings=`` was passed."""
        if self._settings is not None:
            self._tracer.raw.mark(label, self._settings())

    def register_inputs(self, inputs: Any) -> None:
        """Name the tensors in ``inputs`` by their path and hash them now."""
        self._tracer.raw.register_inputs(inputs)

    def add_result(self, name: str, value: Any) -> None:
        """Add a result by which runs are compared, hashed now: a tensor, or a plain Python value."""
        self._tracer.raw.add_result(name, value)

    # ------------------------------------------------------------------------------------------ the finished trace

    def finish(self) -> Trace:
        """Return the complete :class:`~hashbench.core.records.Trace` and release the raw records."""
        if self._finished is None:
            trace, self._notes = self._tracer.finish()
            self._finished = replace(trace, tracer=self.tracer, tracer_reason=self.tracer_reason)
        return self._finished

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(self.finish().records)

    def save(self, path: str | Path) -> None:
        """Write the trace as text (see ``trace.file``), atomically; gzip-compressed if the name ends in ``.gz``."""
        trace = self.finish()
        notes = {
            number: " ".join(f"{key}={kept[key]}" for key in ("time", "seconds") if key in kept)
            for number, kept in self._notes.items()
        }
        file.write(trace, Path(path), notes=notes)

    def export_to_json(self, path: str | Path) -> None:
        """Write the trace as one JSON document: ``records``, ``leaves``, ``results``."""
        file.write_json(self.finish(), Path(path))

    # ------------------------------------------------------------------------------------------------------ queries

    @property
    def stats(self) -> dict[str, Any]:
        """Counts so far: ``total_ops``, ``tensor_ops`` (ops that read or wrote a tensor), ``unique_tensors`` (set of
        digests) and ``operation_types`` (calls by op)."""
        records = self._so_far().records
        return {
            "total_ops": len(records),
            "tensor_ops": sum(1 for record in records if record.inputs or record.outputs),
            "unique_tensors": {digest.value for record in records for digest in record.outputs if digest.value},
            "operation_types": Counter(record.op for record in records),
        }

    @property
    def stack_log(self) -> list[dict[str, Any]]:
        """One entry per record so far: ``id`` (from 1), ``func``, ``op_id``, ``caller`` (``""`` unless
        ``source_lines=True``), ``args`` (text of the non-tensor arguments), and ``arg_tensors`` (each tensor argument
        as last written)."""
        trace = self._so_far()
        written = {leaf.id: (leaf.digest,) for leaf in trace.leaves} | {
            record.id: record.outputs for record in trace.records
        }
        return [
            {
                "id": number,
                "func": record.op,
                "op_id": record.id,
                "caller": record.source,
                "args": record.arguments,
                "arg_tensors": [_argument(ref, written[ref.source]) for ref in record.inputs],
            }
            for number, record in enumerate(trace.records, start=1)
        ]

    def _so_far(self) -> Trace:
        if not self.is_active():
            return self.finish()
        with untraced():  # digests are fetched from devices
            return self._tracer.built()[0]

    def print_summary(self, top: int = 10, *, to_file: bool = False) -> None:
        """Print the number of recorded ops, and the ``top`` most frequent ones one to a line; write it to
        ``<log_path>.summary`` instead if ``to_file`` is set."""
        stats = self.stats
        lines = [f"{stats['total_ops']} ops, {len(stats['unique_tensors'])} different tensors"]
        lines += [f"{count:7d}  {name}" for name, count in stats["operation_types"].most_common(top)]
        text = "\n".join(lines)
        if to_file and self.log_path is not None:
            replace_file(self.log_path.with_name(f"{self.log_path.name}.summary"), text + "\n")
        else:
            print(text)

    def get_tensor_flow_graph(self) -> list[dict[str, Any]]:
        """Return one entry per record: ``operation``, ``op_id``, ``module``, ``inputs`` (ids of the writers),
        ``outputs`` (digests)."""
        return [
            {
                "operation": record.op,
                "op_id": record.id,
                "module": record.module,
                "inputs": [ref.source for ref in record.inputs],
                "outputs": [digest.word() for digest in record.outputs],
            }
            for record in self.finish().records
        ]

    def find_tensor_by_hash(self, value: str) -> list[dict[str, str]]:
        """Find where a digest (its text, or a prefix) was written and read: ``op_id``, ``operation``, ``role``."""
        if not value:
            return []
        trace = self.finish()
        owners = {leaf.id for leaf in trace.leaves if leaf.digest.value.startswith(value)}
        uses = [{"op_id": leaf, "operation": "", "role": "leaf"} for leaf in sorted(owners)]
        for record in trace.records:
            roles = ["input"] if any(ref.source in owners for ref in record.inputs) else []
            if any(output.value.startswith(value) for output in record.outputs):
                owners.add(record.id)
                roles.append("output")
            uses += [{"op_id": record.id, "operation": record.op, "role": role} for role in roles]
        return uses


def refuse_nested() -> None:
    """Raise :class:`HashbenchError` if a trace is active in this thread."""
    native.settle()
    if is_tracing():
        raise HashbenchError(
            "cannot nest traces",
            consequence="each would record the other's tensors as its inputs",
            tip="Exit the outer trace first, or use one for both.",
        )


class Recording:
    """Recorded trace whose records are built on demand: building takes longer than every other method here."""

    def __init__(self, trace: HashDebugTrace) -> None:
        self._trace = trace

    @property
    def tracer(self) -> str:
        """The tracer that recorded it: ``native`` or ``python``."""
        return self._trace.tracer

    def finish(self) -> Trace:
        """Build and return the trace; release the raw records."""
        return self._trace.finish()

    @property
    def noted(self) -> Mapping[str, TensorDigest]:
        """Digests of the added results, by name."""
        finished = self._trace._finished
        if finished is not None:
            return {result.name: result.digest for result in finished.results}
        return self._trace._tracer.raw.noted()

    @property
    def ops(self) -> int:
        """Number of recorded ops."""
        finished = self._trace._finished
        return self._trace._tracer.raw.nodes.record_count() if finished is None else len(finished.records)

    @property
    def op_names(self) -> frozenset[str]:
        """Names of the recorded ops."""
        finished = self._trace._finished
        if finished is not None:
            return frozenset(record.op for record in finished.records)
        return frozenset(self._trace._tracer.op_names())

    @functools.cached_property
    def content(self) -> bytes:
        """Return a cheap equality token: equal non-empty tokens of one process imply equal traces; ``b""`` means
        "compare the finished traces". Valid after the trace's ``__exit__`` and before :meth:`finish`."""
        return b"" if self._trace._finished is not None else self._trace._tracer.content()


def _argument(ref: Ref, digests: tuple[TensorDigest, ...]) -> dict[str, Any]:
    """Describe an argument; for a writer with several outputs, by all their hashes: a trace does not say which was
    read."""
    return {
        "argument": ref.argument,
        "written_by": ref.source,
        "hash": ref.digest or " ".join(digest.value or "blank" for digest in digests),
        "shape": digests[0].shape if len(digests) == 1 else None,
        "dtype": digests[0].dtype if len(digests) == 1 else "",
    }
