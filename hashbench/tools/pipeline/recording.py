"""Record batches while they are made, in every process that makes them.

A profiling function (``sys.setprofile``) sees the calls of the dataset and of its transforms, an audit hook the files
that are opened. Only the loader's ``collate_fn`` and ``worker_init_fn`` are wrapped, since nothing else reaches a
worker process. Nothing here draws a random number. The blind spots are listed in ``docs/pipeline.md``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hashbench.core.io import file_digest, from_json, read_file, to_json
from hashbench.core.run.leaves import NotComparableError, flatten
from hashbench.core.run.rng import global_state_digests
from hashbench.core.run.workload import clone_inputs
from hashbench.core.trace.arguments import mapped
from hashbench.core.trace.digest import digest, python_digest
from hashbench.tools.pipeline.loading import NOT_LOADER, Anatomy, dissect
from hashbench.tools.pipeline.observed import (
    MOMENTS,
    BatchRecord,
    BatchRecords,
    LoaderWorker,
    Sample,
    TransformStep,
    moved,
)

_METHODS = frozenset({"__getitem__", "__call__", "_wrapped_call_impl", "forward"})
"""Methods in which work on a sample begins. ``Module.__call__`` is ``_wrapped_call_impl``."""

MAIN_PROCESS = -1
"""Worker number of the main process in its notes."""

_CODE_ENDINGS = (".py", ".pyc", ".so", ".pyi")
_ASKED, _FIRST_MADE = MOMENTS[-2:]
_NO_MORE = object()


@dataclass
class _OpenCall:
    """A call that has not returned: of the dataset (``name`` empty) or of a transform."""

    frame: types.FrameType
    owner: int
    name: str
    states: dict[str, str]


@dataclass
class _SampleInMaking:
    index: str
    states: dict[str, str]
    files: dict[str, None] = field(default_factory=dict)
    before: str | None = None
    has_before: bool = False
    steps: list[TransformStep] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)

    def made(self, drew: tuple[str, ...]) -> Sample:
        files = tuple(self.files) or None
        return Sample(
            index=self.index,
            files=files,
            file_digests=files and tuple(map(file_digest, files)),
            before=self.before,
            steps=tuple(self.steps) or None,
            generators=self.states,
            drew=drew,
            drew_outside=tuple(name for name in drew if name not in self.inside),
        )


class BatchRecorder:
    """Records the processes of one loader, each through its own copy, in place of ``collate_fn`` and
    ``worker_init_fn``.

    It calls the functions that it replaces. While it is switched on in a process, it writes notes to a file in
    ``folder``.
    """

    def __init__(self, loader: DataLoader[Any], folder: Path, *, modules: tuple[str, ...]) -> None:
        self.folder, self.modules, self.batched = folder, modules, loader.batch_sampler is not None
        self.collate_fn, self.worker_init_fn = loader.collate_fn, loader.worker_init_fn
        self.anatomy = Anatomy()
        self._worker: int | None = None
        """The number of this process, where it is watched."""
        self._batches = 0
        self._states: dict[str, str] = {}
        """Those of the generators, since when a batch is made here."""
        self._samples: list[Sample] = []
        self._stack: list[_OpenCall] = []
        self._sample: _SampleInMaking | None = None
        self._is_on = False

    def begin(self, worker: int, dataset: Any) -> None:
        """Set up recording in this process; it starts when switched on."""
        mine = {name: sys.modules[name] for name in self.modules if name in sys.modules}
        self._worker, self.anatomy = worker, dissect(dataset, mine)
        sys.addaudithook(self._audited)  # cannot be taken away; silent while this is off

    def initialise(self, worker: int) -> None:
        """Call the user's ``worker_init_fn`` in a worker, and start recording."""
        info = get_worker_info()
        began = global_state_digests()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
        self.begin(worker, None if info is None else info.dataset)
        self._write(worker=LoaderWorker(worker, began, global_state_digests()))
        self.note_states()
        self._switch(True)

    def note_states(self) -> None:
        """Record the generators' states as those before the next batch."""
        self._states = global_state_digests(self.anatomy.generators)

    def collate(self, samples: Any) -> Any:
        """Return the batch of the user's ``collate_fn``, recording samples and batch."""
        if self._worker is None:
            return self.collate_fn(samples)
        with self.switched(False):
            listed = list(samples) if self.batched and isinstance(samples, (list, tuple)) else [samples]
            after = [content_digest(sample) for sample in listed]
            if len(self._samples) == len(after):  # seen, each with its states
                self.note_states()
        batch = self.collate_fn(samples)
        with self.switched(False):
            self._batch_done(after, content_digest(batch))
        return batch

    @contextlib.contextmanager
    def switched(self, is_on: bool) -> Iterator[None]:
        """Turn recording on, or off while this module does its own work."""
        was_on = self._is_on
        self._switch(is_on)
        try:
            yield
        finally:
            self._switch(was_on)

    def _switch(self, is_on: bool) -> None:
        self._is_on = is_on
        sys.setprofile(self._profiled if is_on else None)

    def _write(self, **entry: object) -> None:
        with (self.folder / f"{self._worker}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(to_json(entry)) + "\n")

    def _batch_done(self, after: list[str | None], digest: str | None) -> None:
        """Write a batch with its recorded samples; ``after`` has one digest for each."""
        made, self._samples = self._samples, []
        if len(made) != len(after):  # made all at once, or yielded: only the whole samples are seen
            made = [Sample() for _ in after]
        samples = tuple(replace(sample, after=whole) for sample, whole in zip(made, after, strict=True))
        worker = None if self._worker == MAIN_PROCESS else self._worker
        before = self._states
        self.note_states()
        self._write(batch=BatchRecord(self._batches, digest, worker, samples, before, moved(before, self._states)))
        self._batches += 1

    # ------------------------------------------------------------------------------------------------ the hooks

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._is_on or self._sample is None:
            return
        path, mode, flags = arguments
        writes = not mode.startswith("r") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
        if not isinstance(path, (str, bytes)) or writes:
            return
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if not name.endswith(_CODE_ENDINGS) and not name.startswith(("/proc/", "/sys/")) and os.path.isfile(name):  # noqa: PTH113
            self._sample.files[name] = None  # no device, and no pipe: what is read of these is gone

    def _profiled(self, frame: types.FrameType, event: str, value: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_name in _METHODS or code in self.anatomy.functions:
                self._called(frame, code)
        elif event == "return" and self._stack and self._stack[-1].frame is frame:
            self._returned(self._stack.pop(), value)

    def _called(self, frame: types.FrameType, code: types.CodeType) -> None:
        arguments = _arguments(frame, code)
        name, owner = self.anatomy.functions.get(code, ""), 0
        if not name:
            if not arguments:
                return
            owner = id(arguments.pop(0))
            if code.co_name == "__getitem__":
                if owner in self.anatomy.datasets and self._sample is None and arguments:
                    index = arguments[0].item() if hasattr(arguments[0], "item") else arguments[0]
                    states = global_state_digests(self.anatomy.generators)
                    self._sample = _SampleInMaking(repr(index), states)
                    self._stack.append(_OpenCall(frame, owner, "", states))
                return
            name = self.anatomy.transforms.get(owner, "")
        if not name or self._sample is None or _names_a_file(arguments):
            return
        if owner and any(call.owner == owner for call in self._stack):
            return  # the inner half of Module.__call__
        if not self._sample.has_before:
            self._sample.has_before = True
            self._sample.before = content_digest(arguments)
        self._stack.append(_OpenCall(frame, owner, name, global_state_digests(self.anatomy.generators)))

    def _returned(self, call: _OpenCall, value: Any) -> None:
        sample = self._sample
        if sample is None:
            return
        drew = moved(call.states, global_state_digests(self.anatomy.generators))
        if call.name:
            sample.steps.append(TransformStep(call.name, content_digest(value), drew))
            if not any(outer.name for outer in self._stack):
                sample.inside.update(drew)
            return
        self._sample = None
        self._samples.append(sample.made(drew))


@contextlib.contextmanager
def watched(loader: DataLoader[Any], folder: Path, *, modules: tuple[str, ...]) -> Iterator[BatchRecorder | None]:
    """Record the loader; yield the recorder of this process where it makes the batches itself.

    The loader's two functions are restored on leaving.
    """
    recorder = BatchRecorder(loader, folder, modules=modules)
    loader.collate_fn = recorder.collate
    if loader.num_workers:
        loader.worker_init_fn = recorder.initialise
    else:
        recorder.begin(MAIN_PROCESS, loader.dataset)
    try:
        yield None if loader.num_workers else recorder
    finally:
        loader.collate_fn, loader.worker_init_fn = recorder.collate_fn, recorder.worker_init_fn


def _arguments(frame: types.FrameType, code: types.CodeType) -> list[Any]:
    """Return the values of a call's positional parameters, followed by those of ``*args``."""
    local = frame.f_locals
    values = [local[name] for name in code.co_varnames[: code.co_argcount] if name in local]
    if code.co_flags & 0x04:  # CO_VARARGS
        values += local.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return values


def _names_a_file(arguments: list[Any]) -> bool:
    """Return True if the first argument is the path of a file: such a function loads, and is no transform."""
    head = arguments[0] if arguments else None
    return isinstance(head, (str, Path)) and os.path.exists(head)  # noqa: PTH110


# -------------------------------------------------------------------------------------- reading what they left


def first_batches(
    loader: Any, *, steps: int, modules: tuple[str, ...], note: Callable[[str], None]
) -> tuple[tuple[Any, ...], BatchRecords, tuple[LoaderWorker, ...]]:
    """Return the first ``steps`` batches of ``loader`` for the model, their record, and the workers.

    ``note`` is called with the name of each moment that is passed.

    Raises:
        Exception: anything that the loader raises.
    """
    if not isinstance(loader, DataLoader):
        return _first_of_iterable(loader, steps=steps, modules=modules, note=note)
    received: list[Any] = []
    digests: list[str | None] = []
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        with watched(loader, Path(folder), modules=modules) as recorder:
            note(_ASKED)
            iterator = iter(loader)
            if recorder is not None:
                recorder.note_states()
            around = contextlib.nullcontext if recorder is None else functools.partial(recorder.switched, True)
            for batch in _taken(iterator, steps, note, around):
                received.append(batch)
                digests.append(content_digest(batch))
            del iterator  # ends the workers
        workers, notes = read_notes(Path(folder))
    batches = matched(digests, notes)
    used = {batch.worker for batch in batches}
    seen = BatchRecords(batches, steps, len(batches) < steps, _absent(loader, batches))
    return tuple(received), seen, tuple(worker for worker in workers if worker.worker in used)


def _first_of_iterable(
    loader: Any, *, steps: int, modules: tuple[str, ...], note: Callable[[str], None]
) -> tuple[tuple[Any, ...], BatchRecords, tuple[LoaderWorker, ...]]:
    """Record any other iterable as :func:`first_batches` does: whole batches, and the generators that moved for each.

    The model gets copies, since the loader may reuse its memory.
    """
    mine = {name: sys.modules[name] for name in modules if name in sys.modules}

    def states(**parts: Any) -> dict[str, str]:
        found = [item for name, part in parts.items() for item in dissect(part, mine, called=name).generators.items()]
        names = {id(generator): name for name, generator in reversed(found)}  # of several names the first
        return global_state_digests({name: generator for name, generator in found if names[id(generator)] == name})

    received: list[Any] = []
    batches: list[BatchRecord] = []
    note(_ASKED)
    before = states(loader=loader)
    iterator = iter(loader)
    for batch in _taken(iterator, steps, note):
        after = states(loader=loader, iterator=iterator)
        appeared = {name: state for name, state in after.items() if name not in before}
        drew = (*moved(before, after), *appeared)
        batches.append(BatchRecord(len(batches), content_digest(batch), None, None, {**before, **appeared}, drew))
        received.append(mapped(batch, lambda leaf: clone_inputs(leaf) if isinstance(leaf, torch.Tensor) else leaf))
        before = after
    seen = BatchRecords(tuple(batches), steps, len(batches) < steps, _absent(loader, tuple(batches)))
    return tuple(received), seen, ()


def _taken(
    iterator: Iterator[Any],
    steps: int,
    note: Callable[[str], None],
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Any]:
    """Yield at most ``steps`` batches, each made within ``around()``."""
    for number in range(steps):
        with around():
            batch = next(iterator, _NO_MORE)
        if batch is _NO_MORE:
            return
        if number == 0:
            note(_FIRST_MADE)
        yield batch


def _absent(loader: Any, batches: tuple[BatchRecord, ...]) -> dict[str, str]:
    """Explain each field that is missing from the batches."""
    absent = {}
    if any(batch.digest is None for batch in batches):
        absent["digest"] = "a batch holds something of a kind that cannot be hashed"
    if not isinstance(loader, DataLoader):
        return absent | dict.fromkeys(("samples", "index", "files", "before", "after"), NOT_LOADER)
    if any(batch.samples is None for batch in batches):
        absent["samples"] = "batches could not be told apart, or were changed after they were collated"
    whole = "is iterable" if isinstance(loader.dataset, IterableDataset) else "makes whole batches"
    no_index = f"the dataset {whole}, so that the making of a single sample is not seen"
    samples = [sample for batch in batches for sample in batch.samples or ()]
    indexed = all(sample.index is not None for sample in samples)
    reasons = {
        "index": no_index,
        "files": "no file was opened by Python while a sample was made (C code opens files unseen)",
        "before": "no transform was seen at work, or it got something that cannot be hashed",
        "after": "a sample holds something of a kind that cannot be hashed",
    }
    for name, reason in reasons.items():
        if any(getattr(sample, name) is None for sample in samples):
            absent[name] = reason if indexed or name == "after" else no_index
    return absent


def read_notes(folder: Path) -> tuple[list[LoaderWorker], dict[int, list[BatchRecord]]]:
    """Read the notes of a loader's processes: the workers, and the batches of each in order.

    Those of the main process have the key ``-1``. An unfinished last line is ignored.
    """
    workers: list[LoaderWorker] = []
    batches: dict[int, list[BatchRecord]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        noted = batches.setdefault(int(path.stem), [])
        for line in read_file(path).decode("utf-8").split("\n")[:-1]:
            entry = json.loads(line)
            if "worker" in entry:
                workers.append(from_json(LoaderWorker, entry["worker"]))
            else:
                noted.append(from_json(BatchRecord, entry["batch"]))
    return workers, batches


def matched(received: Sequence[str | None], made: Mapping[int, Sequence[BatchRecord]]) -> tuple[BatchRecord, ...]:
    """Match each received batch by its digest with the notes of the process that made it.

    Workers take turns, so batch ``n`` comes from worker ``n`` modulo their number, unless that one was exhausted; a
    digest that does not match there is searched for in the notes of the others.
    """
    order = sorted(made)
    waiting = {worker: list(made[worker]) for worker in order}
    batches = []
    for number, whole in enumerate(received):
        first = number % max(1, len(order))
        turns = [waiting[worker] for worker in (*order[first:], *order[:first])]
        notes = next((notes for notes in turns if notes and whole in (None, notes[0].digest)), None)
        batches.append(
            BatchRecord(number, whole) if notes is None else replace(notes.pop(0), number=number, digest=whole)
        )
    return tuple(batches)


# ------------------------------------------------------------------------------------------- digests of contents


def content_digest(value: Any) -> str | None:
    """Hash ``value``, nested in any way, to 16 hexadecimal digits; ``None`` where it holds a type that cannot be
    hashed.

    An image that is not decoded yet is such a value: decoding it here could change how it is decoded later.
    """
    hashed = xxhash.xxh3_64()
    try:
        for name, leaf in flatten(_without_images(value), "value"):
            parts = digest(leaf) if isinstance(leaf, torch.Tensor) else python_digest(leaf)
            hashed.update(repr((name, *parts)).encode(errors="surrogatepass"))
    except (NotComparableError, RecursionError):
        return None
    return hashed.hexdigest()


def _without_images(value: Any) -> Any:
    """Replace each Pillow image in ``value`` by a text with its mode, size and digest."""
    if isinstance(value, Mapping):
        return {key: _without_images(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_without_images, value)] if value else value
    if not isinstance(value, torch.Tensor) and hasattr(value, "getbands") and hasattr(value, "tobytes"):
        if getattr(value, "tile", None):
            raise NotComparableError("an image that is not decoded yet")
        palette = value.getpalette() if value.mode == "P" else None
        return f"image {value.mode} {value.size} {palette} {xxhash.xxh3_64_hexdigest(value.tobytes())}"
    return value
