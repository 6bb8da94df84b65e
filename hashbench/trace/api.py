"""``HashDebugTrace``: records every torch op of a block of code, with digests of all that it wrote.

What a trace does not see: kernels inside a fused op, and with the Python tracer inside a custom op (one record for the
whole op), work that an extension does without the dispatcher, with the Python tracer Python threads of the model's own
and with the native one those that are older than the trace (both see autograd's own threads), writes behind torch's
back (a NumPy view) unless ``hash_inputs`` is on, and what happens in compiled code, a call of which is one record.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.records import OpRecord, Ref, TensorDigest, Trace
from hashbench.trace import file, native
from hashbench.trace.callbacks import TraceCallback, TraceOptions
from hashbench.trace.mode import TracingMode, is_tracing
from hashbench.trace.tracer import choose


class HashDebugTrace:
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
        watcher: a callback, called around every op with the id that its record will have; it may look, capture, and put
            content in place.
        digests: ``"fast"``, by the fastest function on each device, or ``"device"``, as on accelerators, everywhere.
        tracer: ``"native"``, ``"python"`` (the dispatch mode), or ``"auto"``: the native one where it can be used. The
            attribute ``tracer`` says which it is, and ``tracer_reason`` why ``auto`` did not get the native one.

    Raises:
        HashbenchError: the native tracer is asked for and cannot be used.
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
        self._tracer = TracingMode(options) if self._choice.tracer == "python" else native.make_tracer(options)
        self._settings = settings
        self._finished: Trace | None = None
        self._notes: Mapping[int, Mapping[str, Any]] = {}
        if model is not None:
            self._tracer.register_model(model)
        if inputs is not None:
            self._tracer.register_inputs(inputs)

    # ----------------------------------------------------------------------------------------------- recording

    def __enter__(self) -> Self:
        if self._finished is not None:
            raise HashbenchError(
                "cannot enter a trace that is finished",
                consequence="its records are closed, so new ones would be lost",
                tip="Make a new HashDebugTrace for every run.",
            )
        native.settle()
        if is_tracing():
            raise HashbenchError(
                "cannot enter a trace inside another",
                consequence="each would take the other's tensors for its own inputs",
                tip="Leave the outer trace first, or use one for both.",
            )
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
        """What records the ops: ``native`` or ``python``."""
        return self._choice.tracer

    @property
    def tracer_reason(self) -> str:
        """Why ``auto`` did not get the native tracer; empty otherwise."""
        return self._choice.reason

    def is_active(self) -> bool:
        """Whether ops are being recorded now."""
        return self._tracer.active

    @property
    def iteration(self) -> int | None:
        """Written into every record. Set it at the start of each iteration, or call :meth:`step` at its end; until
        then it counts the steps of the optimizer that has made most, and is ``None`` before the first."""
        return self._tracer.iteration

    @iteration.setter
    def iteration(self, number: int) -> None:
        self._tracer.begin_iteration(number)

    def step(self) -> None:
        """An iteration has ended: the records that follow belong to the next. What you say takes precedence: steps of
        optimizers are no longer counted."""
        self._tracer.begin_iteration()

    @property
    def failed_op(self) -> str:
        """The op that raised last; empty where none did."""
        return self._tracer.failed_op

    def mark(self, label: str) -> None:
        """Note torch's global settings at this point of the run, where ``settings=`` was given."""
        if self._settings is not None:
            self._tracer.mark(label, self._settings())

    def register_inputs(self, inputs: Any) -> None:
        """Name the tensors in ``inputs`` by their place and take their digests now."""
        self._tracer.register_inputs(inputs)

    def add_result(self, name: str, value: Any) -> None:
        """Note something by which runs are compared, at its final content: a tensor, or a plain Python value."""
        self._tracer.add_result(name, value)

    # ------------------------------------------------------------------------------------------ the finished trace

    def finish(self) -> Trace:
        """Everything recorded, as a :class:`~hashbench.records.Trace`; the raw records are released."""
        if self._finished is None:
            trace, self._notes = self._tracer.finish()
            self._finished = replace(trace, tracer=self.tracer, tracer_reason=self.tracer_reason)
        return self._finished

    def __iter__(self) -> Iterator[OpRecord]:
        return iter(self.finish().records)

    def save(self, path: str | Path) -> None:
        """Write the trace as text (see ``trace.file``), atomically."""
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
        """Numbers so far: ``total_ops``, ``tensor_ops`` (that read or wrote a tensor), ``unique_tensors`` (set of
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
        """One entry per record so far: ``id`` (from 1), ``func``, ``op_id``, ``caller`` (with ``source_lines=True``,
        else empty), ``args`` (text of what is no tensor), and ``arg_tensors``, what each argument was when it was
        written last."""
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
        return self._tracer.built()[0] if self.is_active() else self.finish()

    def print_summary(self, top: int = 10, *, to_file: bool = False) -> None:
        """Print how many ops of which kind were recorded, the ``top`` most frequent ones a line each; with ``to_file``
        into ``<log_path>.summary`` instead."""
        stats = self.stats
        lines = [f"{stats['total_ops']} ops, {len(stats['unique_tensors'])} different tensors"]
        lines += [f"{count:7d}  {name}" for name, count in stats["operation_types"].most_common(top)]
        text = "\n".join(lines)
        if to_file and self.log_path is not None:
            replace_file(self.log_path.with_name(f"{self.log_path.name}.summary"), text + "\n")
        else:
            print(text)

    def get_tensor_flow_graph(self) -> list[dict[str, Any]]:
        """One entry per record: ``operation``, ``op_id``, ``module``, ``inputs`` (ids of the writers), ``outputs``
        (digests)."""
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
        """Where a digest (its text, or its beginning) was written and read: ``op_id``, ``operation``, ``role``."""
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


class Recording:
    """What a trace has recorded, whose records may never be needed: to make them takes longer than all that is here."""

    def __init__(self, trace: HashDebugTrace) -> None:
        self._trace = trace

    @property
    def tracer(self) -> str:
        """What recorded it: ``native`` or ``python``."""
        return self._trace.tracer

    def finish(self) -> Trace:
        """The trace; what is recorded is released."""
        return self._trace.finish()

    @property
    def noted(self) -> Mapping[str, TensorDigest]:
        """The digests of the results that were added, by name."""
        finished = self._trace._finished
        if finished is not None:
            return {result.name: result.digest for result in finished.results}
        return self._trace._tracer.noted()

    @property
    def ops(self) -> int:
        """How many ops are recorded."""
        finished = self._trace._finished
        return self._trace._tracer.recorded if finished is None else len(finished.records)

    @functools.cached_property
    def content(self) -> bytes:
        """Once the trace is left, and before it is finished: equal and not empty for traces of one process that are
        equal, which is cheaper to know than to finish and compare them. Empty where only that tells."""
        return b"" if self._trace._finished is not None else self._trace._tracer.content()


def _argument(ref: Ref, digests: tuple[TensorDigest, ...]) -> dict[str, Any]:
    """Of a writer with several outputs the trace does not say which was read: the hashes of all are named then."""
    return {
        "argument": ref.argument,
        "written_by": ref.source,
        "hash": ref.digest or " ".join(digest.value or "blank" for digest in digests),
        "shape": digests[0].shape if len(digests) == 1 else None,
        "dtype": digests[0].dtype if len(digests) == 1 else "",
    }
