"""What one check saw of a pipeline: frozen values, written as JSON by ``checkfolder`` and compared by ``stages``.

``None`` always means *not seen*, never *nothing there*; ``absent`` then says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hashbench.records import Trace

CHECK_SCHEMA = 1
"""Version of a check's folder; one of another version is refused."""

MOMENTS = ("start", "imported", "seeded", "loader made", "model made", "first batch asked for", "first batch made")
"""When the states of the global generators are noted in the main process, in this order."""

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
    """One batch as the main process got it. ``worker`` is ``None`` where the main process made it itself."""

    number: int
    digest: str | None
    worker: int | None = None
    samples: tuple[Sample, ...] | None = None


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


@dataclass(frozen=True, slots=True)
class Weights:
    """The initial digests of parameters and buffers by name."""

    parameters: Digests | None
    buffers: Digests | None
    absent: Mapping[str, str] = field(default_factory=dict)


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
