"""What one check saw of a pipeline: frozen values, and the folder that holds them. Imports no torch.

``None`` always means *not seen*, never *nothing there*; ``absent`` then says why. The folder is written whole or not at
all, and read with suspicion: ``check.json`` is written last and holds the digest of every other file, so a folder
without it, or with a file that does not fit it, is refused. What the files say is checked field by field; nothing in
them is executed or unpickled, and no name in them is opened.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.io import file_digest, from_json, read_file, read_json, replace_file, to_json
from hashbench.records import Trace
from hashbench.text import squeezed
from hashbench.trace import file

CHECK_SCHEMA = 1
"""Version of a check's folder; one of another version is refused."""

MOMENTS = ("start", "imported", "seeded", "loader made", "model made", "first batch asked for", "first batch made")
"""When the states of the global generators are noted in the main process, in this order."""

IMPORT, MAKE_LOADER, MAKE_MODEL, LOADER = "the import of the pipeline's file", "make_loader", "make_model", "the loader"
SPANS: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        IMPORT: (MOMENTS[0], MOMENTS[1]),
        MAKE_LOADER: (MOMENTS[2], MOMENTS[3]),
        MAKE_MODEL: (MOMENTS[3], MOMENTS[4]),
        LOADER: (MOMENTS[5], MOMENTS[6]),
    }
)
"""What runs between two of :data:`MOMENTS` and may draw random numbers, in order. ``set_seed`` is not among them: its
draws cannot be told from its seeding."""

Digests = Mapping[str, str]


def moved(before: Digests, after: Digests) -> tuple[str, ...]:
    """The names, of those that both have, whose digests differ: generators that are in another state."""
    return tuple(name for name, state in before.items() if name in after and after[name] != state)


@dataclass(frozen=True, slots=True)
class Step:
    """One transform's work on one sample: its place (``dataset.transform.transforms.1 RandomHorizontalFlip``), the
    digest of what it returned (``None``: of a kind that cannot be hashed), and the generators that it drew from."""

    transform: str
    after: str | None
    drew: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a batch.

    ``files`` are those opened for it, relative to the listing's root; ``before`` is the digest of what the first
    transform got, ``after`` that of the sample as it was collated. ``generators`` are the states just before it was
    made, ``drew`` those that moved while it was made, ``drew_outside`` those that moved outside every transform.
    ``steps`` are in the order in which the transforms finished, the inner before the outer.
    """

    index: str | None = None
    files: tuple[str, ...] | None = None
    file_digests: tuple[str, ...] | None = None
    before: str | None = None
    after: str | None = None
    steps: tuple[Step, ...] | None = None
    generators: Digests | None = None
    drew: tuple[str, ...] = ()
    drew_outside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as the main process got it. ``worker`` is ``None`` where the main process made it itself.

    ``generators`` are the states before the batch was made, or, where its samples were seen being made, before they
    were collated (of a generator that is not older than the batch: as the batch left it); ``drew`` those that moved
    until the batch was there.
    """

    number: int
    digest: str | None
    worker: int | None = None
    samples: tuple[Sample, ...] | None = None
    generators: Digests | None = None
    drew: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that was listed while the pipeline was made: digests of the names in the system's own order, and of the
    sorted names."""

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
    """A transform that was found: its place, its text, how often it was seen at work, and what it drew from then."""

    name: str
    text: str
    calls: int
    drew: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loader:
    """How batches are made. ``draws_by_default``: a sampler of torch's own that shuffles and was given no generator, so
    that it draws from torch's default one; ``None`` for samplers of which that is not known. ``generators`` are the
    states, when the first batch was asked for, of those that the loader and its samplers were given."""

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
class Worker:
    """The generators of a worker process when it began, and after the user's ``worker_init_fn``."""

    worker: int
    began: Digests
    initialised: Digests


@dataclass(frozen=True, slots=True)
class RandomState:
    """``moments``: the states of the global generators of the main process at each of :data:`MOMENTS`. ``workers`` are
    those that handed in a batch that was looked at."""

    moments: Mapping[str, Digests]
    workers: tuple[Worker, ...]

    def drew(self, first: str, last: str) -> tuple[str, ...]:
        """The generators whose state is another at ``last`` than at ``first``."""
        return moved(self.moments.get(first, {}), self.moments.get(last, {}))


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches that were looked at, in order: at most ``asked_for``. ``exhausted``: the loader had no more."""

    batches: tuple[Batch, ...]
    asked_for: int
    exhausted: bool
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """The samples of all batches, in order."""
        return [sample for batch in self.batches for sample in batch.samples or ()]

    @property
    def indices(self) -> tuple[str, ...] | None:
        """What the dataset was asked for, in order; ``None`` where that was not seen of every sample."""
        indices = tuple(sample.index for sample in self.samples if sample.index is not None)
        return indices if indices and len(indices) == len(self.samples) else None

    @property
    def files(self) -> tuple[str, ...] | None:
        """The files that were opened for each sample; ``None`` where they were not seen of each one."""
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
    """The model's first outputs: digests by name, and the first few numbers of each as text. ``losses`` are those of
    the first steps, in full precision."""

    predictions: Digests | None
    shown: Mapping[str, tuple[str, ...]] | None
    losses: tuple[str, ...] | None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine (``hashbench env``), torch's settings, the hash seed of Python and who set it (``user`` or
    ``hashbench``), and the user's own modules in the order of their import."""

    machine: Mapping[str, object]
    settings: Mapping[str, str]
    hash_seed: str
    hash_seed_by: str
    imports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """All that one run of a pipeline left."""

    surroundings: Surroundings
    random_state: RandomState
    loader: Loader
    batches: Batches
    weights: Weights
    outputs: Outputs
    layers: tuple[tuple[str, ...], ...] | None = None
    trace: Trace | None = None


@dataclass(frozen=True, slots=True)
class Repetition:
    """What ``check`` found when it ran the pipeline again. ``first`` is the first stage that differs, empty where none
    does. ``hash_order``: gone with the same hash seed (``None``: not tried)."""

    repeats: bool
    first: str
    hash_order: bool | None
    runs: int


# ----------------------------------------------------------------------------------------------- the folder of a check

CHECK_FILE = "check.json"
LAYERS_FILE, TRACE_FILE, PLAIN_TRACE_FILE = "model_inspection.csv", "trace.log.gz", "trace.log"
REPEAT_FOLDER = "repeat"
LAYER_COLUMNS = ("layer", "type", "call", "output", "shape", "dtype", "mean", "std", "min", "max", "digest")

_DOCUMENTS: Mapping[str, tuple[str, type]] = types.MappingProxyType(
    {
        "environment.json": ("surroundings", Surroundings),
        "rng.json": ("random_state", RandomState),
        "loader.json": ("loader", Loader),
        "batch_info.json": ("batches", Batches),
        "model_weights.json": ("weights", Weights),
        "predictions.json": ("outputs", Outputs),
    }
)
_FILES = (*_DOCUMENTS, LAYERS_FILE, PLAIN_TRACE_FILE, TRACE_FILE)
_LARGEST = 512 * 2**20
"""Bytes of a file that is still read: a trace of a large model has some ten."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check as it was read: its name for people, what was seen, and what its own repetition found."""

    name: str
    seen: Observed
    repetition: Repetition | None


@dataclass(frozen=True, slots=True)
class _Manifest:
    """The content of ``check.json``; ``files`` are digests by name."""

    schema: int
    files: Mapping[str, str]
    repetition: Repetition | None


def write_run(seen: Observed, folder: Path) -> None:
    """Write the files of one run into ``folder``, which is there. ``model_inspection.csv`` and ``trace.log.gz`` are
    left out where the pipeline has no model."""
    for name, (part, _) in _DOCUMENTS.items():
        _write(folder / name, getattr(seen, part))
    if seen.layers is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([LAYER_COLUMNS, *seen.layers])
        replace_file(folder / LAYERS_FILE, text.getvalue())
    if seen.trace is not None:
        file.write(seen.trace, folder / TRACE_FILE)


def seal(folder: Path, repetition: Repetition | None) -> None:
    """Write ``check.json``, by which the folder is whole."""
    digests = {name: file_digest(folder / name) for name in _FILES if (folder / name).exists()}
    _write(folder / CHECK_FILE, _Manifest(CHECK_SCHEMA, digests, repetition))


def _write(path: Path, value: object) -> None:
    replace_file(path, json.dumps(to_json(value), indent=1) + "\n")


def read(folder: Path) -> Check:
    """Read the folder of a check.

    Raises:
        HashbenchError: it is missing, half written, damaged, or of another version.
    """
    with _damage_refused(folder, CHECK_FILE):
        document = _json(_file(folder, CHECK_FILE))
        if not isinstance(document, dict):
            raise _unreadable(folder, f"{CHECK_FILE} is not one")
        if document.get("schema") != CHECK_SCHEMA:
            version = str(document.get("schema", "none"))[:20]
            raise _unreadable(folder, f"it has schema version {version}, this hashbench reads {CHECK_SCHEMA}")
        manifest = from_json(_Manifest, document, where=CHECK_FILE)
    parts: dict[str, Any] = {}
    for name in _FILES:
        if name not in manifest.files:
            if name in _DOCUMENTS or (folder / name).exists():
                raise _unreadable(folder, f"{CHECK_FILE} says nothing of {name}")
            continue
        path = _file(folder, name)
        if file_digest(path) != manifest.files[name]:
            raise _unreadable(folder, f"{name} is damaged (it is not what {CHECK_FILE} says)")
        with _damage_refused(folder, name):
            if name in (TRACE_FILE, PLAIN_TRACE_FILE):
                parts["trace"] = file.read(path)
            elif name == LAYERS_FILE:
                parts["layers"] = _layers(path)
            else:
                part, kind = _DOCUMENTS[name]
                parts[part] = from_json(kind, _json(path))
    return Check(str(folder), Observed(**parts), manifest.repetition)


def _file(folder: Path, name: str) -> Path:
    """A file of the folder, of a size that is read."""
    path = folder / name
    if not path.is_file():
        raise _unreadable(folder, f"it has no {name}" if folder.is_dir() else "it does not exist")
    if path.stat().st_size > _LARGEST:
        raise _unreadable(folder, f"{name} has more than {_LARGEST // 2**20} MiB")
    return path


def _json(path: Path) -> Any:
    return read_json(path)


def _layers(path: Path) -> tuple[tuple[str, ...], ...]:
    header, *rows = list(csv.reader(io.StringIO(read_file(path).decode("utf-8"), newline=""))) or [[]]
    if any(len(row) != len(LAYER_COLUMNS) for row in rows) or tuple(header) != LAYER_COLUMNS:
        raise _unreadable(path.parent, f"{LAYERS_FILE} has other columns")
    return tuple(map(tuple, rows))


@contextlib.contextmanager
def _damage_refused(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, csv.Error) as error:
        reason = squeezed(str(error), 120) or type(error).__name__
        raise _unreadable(folder, f"{name} is damaged ({reason})") from error


def _unreadable(folder: Path, reason: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read the check {folder}",
        consequence=f"{reason}, so nothing was compared",
        tip=f"Make it again with `hashbench pipeline check --output-dir {folder}`.",
    )
