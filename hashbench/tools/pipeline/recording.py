"""Watching batches being made, in whatever process makes them.

What the user made stays as it is: a profiling function (``sys.setprofile``) sees the calls of the dataset and of its
transforms, an audit hook sees the files that are opened. Only the loader's ``collate_fn`` and ``worker_init_fn`` are
wrapped, since no other way leads into a worker process. Nothing here draws a random number.

What is not seen: transforms that are C functions, files that C code opens by itself (``torchvision.io``, LMDB), samples
of a dataset that makes whole batches (``__getitems__``) or yields samples (``IterableDataset``) before they are whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from hashbench.io import file_digest, from_json
from hashbench.run.rng import global_state_digests
from hashbench.tools.pipeline.anatomy import Anatomy, dissect
from hashbench.tools.pipeline.contents import content_digest, moved
from hashbench.tools.pipeline.observed import Sample, Step, Worker

_METHODS = frozenset({"__getitem__", "__call__", "_wrapped_call_impl", "forward"})
"""Of objects: where work on a sample begins. ``Module.__call__`` is ``_wrapped_call_impl``."""

MAIN_PROCESS = -1
"""The number under which the main process keeps its notes."""

_CODE_ENDINGS = (".py", ".pyc", ".so", ".pyi")


@dataclass
class _Open:
    """A call that has not returned: a sample being made (``name`` empty) or a transform at work."""

    frame: types.FrameType
    owner: int
    name: str
    states: dict[str, str]


@dataclass
class _SampleInMaking:
    index: str
    states: dict[str, str]
    files: list[str] = field(default_factory=list)
    before: str | None = None
    has_before: bool = False
    steps: list[Step] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)


class Watch:
    """Follows one loader through all processes that work for it. Each writes what it saw into a file in ``folder``."""

    def __init__(self, folder: Path, *, modules: tuple[str, ...]) -> None:
        self.folder, self.modules = folder, modules
        self._recorder: Recorder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recorder": None}

    def begin(self, worker: int, dataset: Any) -> Recorder:
        """Watch this process from now on."""
        mine = {name: sys.modules[name] for name in self.modules if name in sys.modules}
        self._recorder = Recorder(self.folder / f"{worker}.jsonl", dissect(dataset, mine))
        return self._recorder

    @property
    def recorder(self) -> Recorder | None:
        """That of this process, where it watches."""
        return self._recorder


class WatchedInit:
    """A ``worker_init_fn`` that begins to watch, and calls the user's."""

    def __init__(self, inner: Callable[[int], object] | None, watch: Watch) -> None:
        self.inner, self.watch = inner, watch

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        began = global_state_digests()
        if self.inner is not None:
            self.inner(worker)
        recorder = self.watch.begin(worker, None if info is None else info.dataset)
        recorder.write({"worker": dataclasses.asdict(Worker(worker, began, global_state_digests()))})
        recorder.start()


class WatchedCollate:
    """A ``collate_fn`` that looks at samples and batch, and leaves the work to the user's."""

    def __init__(self, inner: Callable[[Any], Any], watch: Watch, *, batched: bool) -> None:
        self.inner, self.watch, self.batched = inner, watch, batched

    def __call__(self, samples: Any) -> Any:
        recorder = self.watch.recorder
        if recorder is None:
            return self.inner(samples)
        with recorder.paused():
            listed = list(samples) if self.batched and isinstance(samples, (list, tuple)) else [samples]
            after = [content_digest(sample) for sample in listed]
        batch = self.inner(samples)
        with recorder.paused():
            recorder.batch_done(after, content_digest(batch))
        return batch


class Recorder:
    """What one process saw. ``start`` and ``stop`` switch it."""

    def __init__(self, path: Path, anatomy: Anatomy) -> None:
        self.path, self.anatomy = path, anatomy
        self._samples: list[Sample] = []
        self._stack: list[_Open] = []
        self._sample: _SampleInMaking | None = None
        self._is_on = False
        sys.addaudithook(self._audited)  # cannot be taken away; silent while this is off

    def start(self) -> None:
        """See calls from now on."""
        self._is_on = True
        sys.setprofile(self._profiled)

    def stop(self) -> None:
        """See nothing any more."""
        self._is_on = False
        sys.setprofile(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the recorder's own work is not seen."""
        was_on = self._is_on
        self.stop()
        try:
            yield
        finally:
            if was_on:
                self.start()

    def write(self, entry: object) -> None:
        """Append a line to this process's file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def batch_done(self, after: list[str | None], digest: str | None) -> None:
        """Note a batch with what is known of its samples; ``after`` has one digest for each."""
        made, self._samples = self._samples, []
        if len(made) != len(after):  # made all at once, or yielded: only the whole samples are seen
            made = [Sample() for _ in after]
        samples = [dataclasses.replace(sample, after=found) for sample, found in zip(made, after, strict=True)]
        self.write({"digest": digest, "samples": [dataclasses.asdict(sample) for sample in samples]})

    # ------------------------------------------------------------------------------------------------ the hooks

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._is_on or self._sample is None:
            return
        path, mode, flags = arguments
        writes = not mode.startswith("r") if isinstance(mode, str) else flags & (os.O_WRONLY | os.O_RDWR)
        if not isinstance(path, (str, bytes)) or writes:
            return
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if not name.endswith(_CODE_ENDINGS) and not name.startswith(("/proc/", "/sys/", "/dev/")):
            self._sample.files.append(name)

    def _profiled(self, frame: types.FrameType, event: str, value: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_name in _METHODS or code in self.anatomy.functions:
                self._called(frame, code)
        elif event == "return" and self._stack and self._stack[-1].frame is frame:
            self._returned(self._stack.pop(), value)

    def _called(self, frame: types.FrameType, code: types.CodeType) -> None:
        arguments = _arguments(frame, code)
        name = self.anatomy.functions.get(code, "")
        owner = 0
        if not name:
            if not arguments:
                return
            owner = id(arguments.pop(0))
            if code.co_name == "__getitem__":
                if owner in self.anatomy.datasets and self._sample is None and arguments:
                    states = global_state_digests(self.anatomy.generators)
                    self._sample = _SampleInMaking(repr(_plain_index(arguments[0])), states)
                    self._stack.append(_Open(frame, owner, "", states))
                return
            name = self.anatomy.transforms.get(owner, "")
        if not name or self._sample is None or _names_a_file(arguments):
            return
        if owner and any(call.owner == owner for call in self._stack):
            return  # the inner half of Module.__call__
        if not self._sample.has_before:
            self._sample.has_before = True
            self._sample.before = content_digest(arguments)
        self._stack.append(_Open(frame, owner, name, global_state_digests(self.anatomy.generators)))

    def _returned(self, call: _Open, value: Any) -> None:
        sample = self._sample
        if sample is None:
            return
        drew = moved(call.states, global_state_digests(self.anatomy.generators))
        if call.name:
            sample.steps.append(Step(call.name, content_digest(value), drew))
            if not any(outer.name for outer in self._stack):
                sample.inside.update(drew)
            return
        self._sample = None
        files = list(dict.fromkeys(sample.files))
        self._samples.append(
            Sample(
                index=sample.index,
                files=tuple(files) if files else None,
                file_digests=tuple(file_digest(file) for file in files) if files else None,
                before=sample.before,
                steps=tuple(sample.steps) if sample.steps else None,
                generators=sample.states,
                drew=drew,
                drew_outside=tuple(name for name in drew if name not in sample.inside),
            )
        )


def _arguments(frame: types.FrameType, code: types.CodeType) -> list[Any]:
    """The values of a call's positional parameters, those of ``*args`` behind them."""
    local = frame.f_locals
    found = [local[name] for name in code.co_varnames[: code.co_argcount] if name in local]
    if code.co_flags & 0x04:  # CO_VARARGS
        found += local.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return found


def _names_a_file(arguments: list[Any]) -> bool:
    """Whether a function is called with the name of a file: it loads one, and transforms nothing."""
    head = arguments[0] if arguments else None
    return isinstance(head, (str, Path)) and os.path.exists(head)  # noqa: PTH110


def _plain_index(index: Any) -> Any:
    return index.item() if hasattr(index, "item") else index


# -------------------------------------------------------------------------------------- reading what they left


@dataclass(frozen=True, slots=True)
class Noted:
    """A batch as the process that made it noted it."""

    worker: int | None
    digest: str | None
    samples: tuple[Sample, ...]


def read_notes(folder: Path) -> tuple[list[Worker], dict[int, list[Noted]]]:
    """Everything that the processes of a loader wrote: the workers, and the batches of each in order (those of the main
    process under ``-1``). A last line that its writer did not finish is passed over."""
    workers: list[Worker] = []
    batches: dict[int, list[Noted]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        number = int(path.stem)
        noted = batches.setdefault(number, [])
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            entry = json.loads(line)
            if "worker" in entry:
                workers.append(from_json(Worker, entry["worker"]))
            else:
                samples = from_json(tuple[Sample, ...], entry["samples"], where="samples")
                noted.append(Noted(None if number == MAIN_PROCESS else number, entry["digest"], samples))
    return workers, batches


def matched(received: list[str | None], made: dict[int, list[Noted]]) -> list[Noted | None]:
    """For each batch that was received, by its digest, the note of the process that made it.

    Workers take turns, so that batch ``n`` comes from worker ``n`` modulo their number, unless one had nothing left;
    a digest that does not fit there is looked for with the others.
    """
    order = sorted(made)
    places = dict.fromkeys(order, 0)
    found: list[Noted | None] = []
    for number, digest in enumerate(received):
        turns = itertools.islice(itertools.cycle(order), number % max(1, len(order)), None)
        found.append(None)
        for worker in itertools.islice(turns, len(order)):
            rest = made[worker][places[worker] :]
            if rest and (digest is None or rest[0].digest == digest):
                places[worker] += 1
                found[-1] = rest[0]
                break
    return found
