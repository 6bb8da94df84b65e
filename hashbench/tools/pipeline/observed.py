"""The record of one check: frozen values, and the folder that holds them. Imports no torch.

``None`` always means *not recorded*, never *empty*; ``absent`` then says why. The folder is untrusted input:
``check.json`` is written last and holds the digest of every other file, so a folder without it, or with a file that
does not match, is refused. Fields are validated one by one; nothing is executed or unpickled, and no path in the files
is opened.
"""

from __future__ import annotations

import csv
import io
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashbench.core.io import file_digest, from_json, read_file, read_json, replace_file, to_json
from hashbench.core.records import Trace
from hashbench.core.sealed import Sealed
from hashbench.core.trace import file

CHECK_SCHEMA = 1
"""Version of a check's folder; other versions are refused."""

MOMENTS = ("start", "imported", "seeded", "loader made", "model made", "first batch asked for", "first batch made")
"""Moments at which the states of the global generators are recorded in the main process, in order."""

IMPORT, MAKE_LOADER, MAKE_MODEL, LOADER = "the import of the pipeline's file", "make_loader", "make_model", "the loader"
SPANS: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        IMPORT: (MOMENTS[0], MOMENTS[1]),
        MAKE_LOADER: (MOMENTS[2], MOMENTS[3]),
        MAKE_MODEL: (MOMENTS[3], MOMENTS[4]),
        LOADER: (MOMENTS[5], MOMENTS[6]),
    }
)
"""Code that runs between two of :data:`MOMENTS` and may draw random numbers, in order. ``set_seed`` is not among them:
its draws cannot be distinguished from its seeding."""

Digests = Mapping[str, str]


def moved(before: Digests, after: Digests) -> tuple[str, ...]:
    """Return the names present in both whose digests differ: generators in another state."""
    return tuple(name for name, state in before.items() if name in after and after[name] != state)


@dataclass(frozen=True, slots=True)
class TransformStep:
    """One transform applied to one sample.

    Attributes:
        transform: its attribute path and class (``dataset.transform.transforms.1 RandomHorizontalFlip``).
        after: digest of its result; ``None`` for a type that cannot be hashed.
        drew: the generators that it drew from.
    """

    transform: str
    after: str | None
    drew: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a batch.

    Attributes:
        index: the index that the dataset was asked for, as text.
        files: opened for it, relative to the listing's root.
        file_digests: digests of their contents.
        before: digest of the first transform's input.
        after: digest of the sample as it was collated.
        steps: in the order in which the transforms finished, inner before outer.
        generators: states just before it was made.
        drew: generators that moved while it was made.
        drew_outside: generators that moved outside every transform.
    """

    index: str | None = None
    files: tuple[str, ...] | None = None
    file_digests: tuple[str, ...] | None = None
    before: str | None = None
    after: str | None = None
    steps: tuple[TransformStep, ...] | None = None
    generators: Digests | None = None
    drew: tuple[str, ...] = ()
    drew_outside: tuple[str, ...] = ()

    @property
    def content(self) -> tuple[str | None, tuple[str, ...] | None] | None:
        """What it is before any transform; ``None`` where nothing of that was recorded."""
        return None if self.before is None and self.file_digests is None else (self.before, self.file_digests)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch as the main process received it.

    Attributes:
        number: from 0.
        digest: of its content.
        worker: ``None`` where the main process made it itself.
        samples: those in it.
        generators: states before the batch was made, or, where its samples were recorded, before they were collated (of
            a generator created with the batch: its state afterwards).
        drew: generators that moved until the batch was complete.
    """

    number: int
    digest: str | None
    worker: int | None = None
    samples: tuple[Sample, ...] | None = None
    generators: Digests | None = None
    drew: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that was listed while the pipeline was made.

    Attributes:
        path: relative to the listing's root.
        entries: their number.
        in_order: digest of the names in the system's order.
        as_set: digest of the sorted names.
    """

    path: str
    entries: int
    in_order: str
    as_set: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The dataset's own list of files: the attribute that holds it, the folder they share, and their names below it."""

    attribute: str
    root: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform: its attribute path, its text, the number of recorded calls, and the generators they drew from."""

    name: str
    text: str
    calls: int
    drew: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loader:
    """Settings and parts of the loader; the fields are those of ``DataLoader`` where they share its names.

    Attributes:
        draws_by_default: a shuffling sampler of torch without a generator, which draws from torch's default one;
            ``None`` for samplers where that is not known.
        generators: states, when the first batch was requested, of those passed to the loader and its samplers.
    """

    kind: str
    dataset: str
    length: int | None
    batch_size: int | None
    num_workers: int
    shuffle: bool | None
    sampler: str
    batch_sampler: str
    draws_by_default: bool | None
    generators: Digests
    seed: int
    worker_init_fn: str | None
    collate_fn: str | None
    start_method: str | None
    persistent_workers: bool
    drop_last: bool
    pin_memory: bool
    transforms: tuple[Transform, ...] | None
    random_transforms: tuple[str, ...] | None
    listing: Listing | None
    folders: tuple[Folder, ...]
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoaderWorker:
    """The generators of a worker process at its start, and after the user's ``worker_init_fn``."""

    worker: int
    began: Digests
    initialised: Digests


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of the random generators.

    Attributes:
        moments: those of the main process's global generators at each of :data:`MOMENTS`.
        workers: those of the workers that made a recorded batch.
    """

    moments: Mapping[str, Digests]
    workers: tuple[LoaderWorker, ...]

    def drew(self, first: str, last: str) -> tuple[str, ...]:
        """Return the generators whose states at ``first`` and at ``last`` differ."""
        return moved(self.moments.get(first, {}), self.moments.get(last, {}))


@dataclass(frozen=True, slots=True)
class BatchRecords:
    """The recorded batches, in order.

    Attributes:
        batches: at most ``asked_for``.
        asked_for: the number of steps.
        exhausted: the loader had no more.
        absent: why fields are ``None``, by name.
    """

    batches: tuple[BatchRecord, ...]
    asked_for: int
    exhausted: bool
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """The samples of all batches, in order."""
        return [sample for batch in self.batches for sample in batch.samples or ()]

    @property
    def indices(self) -> tuple[str, ...] | None:
        """The indices that the dataset was asked for, in order; ``None`` where one was not recorded."""
        indices = tuple(sample.index for sample in self.samples if sample.index is not None)
        return indices if indices and len(indices) == len(self.samples) else None

    @property
    def files(self) -> tuple[str, ...] | None:
        """The files that were opened for each sample; ``None`` where they were not recorded for each one."""
        files = [sample.files for sample in self.samples]
        return tuple(" ".join(names or ()) for names in files) if files and None not in files else None


@dataclass(frozen=True, slots=True)
class Weights:
    """The initial digests of parameters and buffers by name."""

    parameters: Digests | None
    buffers: Digests | None
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_name(self) -> Digests | None:
        """Digests of both by name; ``None`` where there is no model."""
        return None if self.parameters is None else {**self.parameters, **(self.buffers or {})}


@dataclass(frozen=True, slots=True)
class Outputs:
    """The model's first outputs.

    Attributes:
        predictions: digests by name.
        shown: the first few numbers of each, as text.
        losses: of the first steps, in full precision.
        absent: why fields are ``None``, by name.
    """

    predictions: Digests | None
    shown: Mapping[str, tuple[str, ...]] | None
    losses: tuple[str, ...] | None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The environment of the run.

    Attributes:
        machine: as printed by ``hashbench env``.
        settings: torch's.
        hash_seed: ``PYTHONHASHSEED`` of the run.
        hash_seed_by: who set it: ``user`` or ``hashbench``.
        imports: the user's own modules in import order.
        hash_calls: lines of these modules that call ``hash``, as ``training.py:21``.
    """

    machine: Mapping[str, object]
    settings: Mapping[str, str]
    hash_seed: str
    hash_seed_by: str
    imports: tuple[str, ...]
    hash_calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """The record of one run of a pipeline."""

    surroundings: Surroundings
    random_state: RandomState
    loader: Loader
    batches: BatchRecords
    weights: Weights
    outputs: Outputs
    layers: tuple[tuple[str, ...], ...] | None = None
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class RepeatResult:
    """The result of rerunning the pipeline within ``check``.

    Attributes:
        repeats: the two runs agreed.
        first: the first stage that differs; empty where none does.
        hash_order: the difference disappears with an equal hash seed (``None``: not tested).
        runs: how many were made.
    """

    repeats: bool
    first: str
    hash_order: bool | None
    runs: int


# ----------------------------------------------------------------------------------------------- the folder of a check

_CHECK = Sealed(
    CHECK_SCHEMA,
    "check",
    consequence="{}, so nothing was compared",
    tip="Make it again with `hashbench pipeline check --output-dir {}`.",
)
CHECK_FILE = "check.json"
LAYERS_FILE, TRACE_FILE, PLAIN_TRACE_FILE = "model_inspection.csv", "trace.log.gz", "trace.log"
REPEAT_FOLDER = "repeat"
LAYER_COLUMNS = ("layer", "type", "call", "output", "shape", "dtype", "mean", "std", "min", "max", "digest")

_DOCUMENTS: Mapping[str, tuple[str, type]] = types.MappingProxyType(
    {
        "environment.json": ("surroundings", Surroundings),
        "rng.json": ("random_state", RandomState),
        "loader.json": ("loader", Loader),
        "batch_info.json": ("batches", BatchRecords),
        "model_weights.json": ("weights", Weights),
        "predictions.json": ("outputs", Outputs),
    }
)
_FILES = (*_DOCUMENTS, LAYERS_FILE, PLAIN_TRACE_FILE, TRACE_FILE)


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """A check read from its folder: its display name, the record, and the result of its own rerun."""

    name: str
    seen: Observed
    repetition: RepeatResult | None


@dataclass(frozen=True, slots=True)
class _Manifest:
    """The content of ``check.json``; ``files`` are digests by name."""

    schema: int
    files: Mapping[str, str]
    repetition: RepeatResult | None


def write_run(seen: Observed, folder: Path) -> None:
    """Write the files of one run into ``folder``, which must exist.

    ``model_inspection.csv`` and ``trace.log.gz`` are left out where the pipeline has no model.
    """
    for name, (part, _) in _DOCUMENTS.items():
        _write(folder / name, getattr(seen, part))
    if seen.layers is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([LAYER_COLUMNS, *seen.layers])
        replace_file(folder / LAYERS_FILE, text.getvalue())
    if seen.trace is not None:
        file.write(seen.trace, folder / TRACE_FILE)


def seal(folder: Path, repetition: RepeatResult | None) -> None:
    """Write ``check.json``, which completes the folder."""
    digests = {name: file_digest(folder / name) for name in _FILES if (folder / name).exists()}
    _write(folder / CHECK_FILE, _Manifest(CHECK_SCHEMA, digests, repetition))


def _write(path: Path, value: object) -> None:
    replace_file(path, json.dumps(to_json(value), indent=1) + "\n")


def read(folder: Path) -> CheckRecord:
    """Read the folder of a check.

    Raises:
        HashbenchError: it is missing, incomplete, damaged, or of another version.
    """
    with _CHECK.refusing(folder):
        content = _CHECK.read_object(_file(folder, CHECK_FILE), where=CHECK_FILE)
        manifest = from_json(_Manifest, content, where=CHECK_FILE)
        parts = dict(_parts(folder, manifest.files))
    return CheckRecord(str(folder), Observed(**parts), manifest.repetition)


def _parts(folder: Path, digests: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name in _FILES:
        if name not in digests:
            if name in _DOCUMENTS or (folder / name).exists():
                raise ValueError(f"{CHECK_FILE} says nothing of {name}")
            continue
        path = _file(folder, name)
        _CHECK.refuse_other_file(path, digests[name])
        if name in _DOCUMENTS:
            part, kind = _DOCUMENTS[name]
            yield part, from_json(kind, read_json(path), where=name)
        else:
            yield ("layers", _layers(path)) if name == LAYERS_FILE else ("trace", file.read(path))


def _file(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder, or raise where it is missing."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"it has no {name}" if folder.is_dir() else "it does not exist")
    return path


def _layers(path: Path) -> tuple[tuple[str, ...], ...]:
    try:
        header, *rows = list(csv.reader(io.StringIO(read_file(path).decode("utf-8"), newline=""))) or [[]]
    except csv.Error as error:
        raise ValueError(f"{LAYERS_FILE} is no table ({error})") from None
    if any(len(row) != len(LAYER_COLUMNS) for row in rows) or tuple(header) != LAYER_COLUMNS:
        raise ValueError(f"{LAYERS_FILE} has other columns")
    return tuple(map(tuple, rows))
