"""The user's loader: what it is made of, and its first batches, watched while they are made."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hashbench.run.rng import is_generator, state_digest
from hashbench.tools.pipeline.observed import MOMENTS, Batch, Batches, Folder, Loader, Transform, Worker
from hashbench.tools.pipeline.recording import (
    Anatomy,
    content_digest,
    dissect,
    length_of,
    listing_of,
    matched,
    read_notes,
    watched,
)

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_ASKED, _FIRST_MADE = MOMENTS[-2:]
_NO_MORE = object()
_MOST_ENTRIES = 1_000_000
_NOT_LOADER = "the loader is not a torch.utils.data.DataLoader, so only its batches are seen"


def first_batches(
    loader: Any, *, steps: int, modules: tuple[str, ...], note: Callable[[str], None]
) -> tuple[tuple[Any, ...], Batches, tuple[Worker, ...]]:
    """The first ``steps`` batches of ``loader`` for the model, what was seen of their making, and the workers.

    ``note`` is called with each of the moments that come by meanwhile.

    Raises:
        Exception: whatever the loader raises.
    """
    received: list[Any] = []
    digests: list[str | None] = []
    exhausted = False
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        with watched(loader, Path(folder), modules=modules) as recorder:
            note(_ASKED)
            iterator = iter(loader)
            while len(received) < steps:
                with recorder.switched(True) if recorder is not None else contextlib.nullcontext():
                    batch = next(iterator, _NO_MORE)
                if batch is _NO_MORE:
                    exhausted = True
                    break
                if not received:
                    note(_FIRST_MADE)
                received.append(batch)
                digests.append(content_digest(batch))
            del iterator  # ends the workers
        workers, notes = read_notes(Path(folder))
    batches = matched(digests, notes)
    used = {batch.worker for batch in batches}
    seen = Batches(batches, steps, exhausted, _absent(loader, batches))
    return tuple(received), seen, tuple(worker for worker in workers if worker.worker in used)


def _absent(loader: Any, batches: tuple[Batch, ...]) -> dict[str, str]:
    """Why what is missing from the batches is missing."""
    absent = {}
    if any(batch.digest is None for batch in batches):
        absent["digest"] = "a batch holds something of a kind that cannot be hashed"
    if not isinstance(loader, DataLoader):
        return absent | dict.fromkeys(("samples", "files", "before", "after"), _NOT_LOADER)
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


# --------------------------------------------------------------------------------------------------- the facts


def facts_of(loader: Any, *, seed: int, batches: Batches, given: dict[str, str]) -> Loader:
    """What the loader is made of, without the folders that were listed. ``given``: :func:`given_generators`, of before
    the first batch."""
    is_torchs = isinstance(loader, DataLoader)
    dataset = getattr(loader, "dataset", None)
    anatomy = Anatomy() if dataset is None else dissect(dataset)
    transforms, listing = _transforms(anatomy, batches), listing_of(anatomy)
    order = _order_of(loader) if is_torchs else None
    shuffles, draws_by_default = None, None
    if isinstance(order, _SHUFFLING):
        shuffles, draws_by_default = True, order.generator is None
    elif isinstance(order, SequentialSampler):
        shuffles, draws_by_default = False, False
    absent = {} if is_torchs else {"loader": _NOT_LOADER}
    if listing is None:
        absent["listing"] = "the dataset holds no list of files as long as it is itself"
    if not transforms:
        absent["transforms"] = "no transform was found in the dataset"
    return Loader(
        kind=_kind(loader),
        dataset=_kind(dataset),
        length=length_of(dataset),
        batch_size=loader.batch_size if is_torchs else None,
        num_workers=loader.num_workers if is_torchs else 0,
        shuffle=shuffles,
        sampler=_kind(getattr(loader, "sampler", None)),
        batch_sampler=_kind(getattr(loader, "batch_sampler", None)),
        draws_by_default=draws_by_default,
        generators=given,
        seed=seed,
        worker_init_fn=_kind(getattr(loader, "worker_init_fn", None)) or None,
        collate_fn=_kind(getattr(loader, "collate_fn", None)) or None,
        start_method=_start_method(loader) if is_torchs else None,
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
        drop_last=bool(getattr(loader, "drop_last", False)),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        transforms=transforms or None,
        random_transforms=tuple(item.name for item in transforms if item.drew) if transforms else None,
        listing=listing,
        folders=(),
        absent=absent,
    )


def given_generators(loader: Any) -> dict[str, str]:
    """The states of the generators that the loader and its samplers hold, by name."""
    owners = {"loader": loader}
    owners |= {name: getattr(loader, name, None) for name in ("sampler", "batch_sampler")}
    return {
        f"{name}.{attribute}": state_digest(value)
        for name, owner in owners.items()
        for attribute, value in list(getattr(owner, "__dict__", {}).items())
        if is_generator(value)
    }


def _transforms(anatomy: Anatomy, batches: Batches) -> tuple[Transform, ...]:
    """Those that were seen at work, in the order in which they are found in the dataset."""
    steps = [step for sample in batches.samples for step in sample.steps or ()]
    transforms = []
    for name in dict.fromkeys([*anatomy.texts, *(step.transform for step in steps)]):
        drew = [step.drew for step in steps if step.transform == name]
        if drew:
            generators = sorted({generator for names in drew for generator in names})
            transforms.append(Transform(name, anatomy.texts.get(name, name), len(drew), tuple(generators)))
    return tuple(transforms)


def _order_of(loader: DataLoader[Any]) -> Any:
    """What decides the order: with a batch sampler of the user's own, ``loader.sampler`` is there but never asked."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def _start_method(loader: DataLoader[Any]) -> str | None:
    if not loader.num_workers:
        return None
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return str(context.get_start_method())


def _kind(value: Any) -> str:
    """The name of a function, or of an object's class, with its module."""
    if value is None:
        return ""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


@contextlib.contextmanager
def listed_folders() -> Iterator[list[str]]:
    """The absolute paths of the folders that are listed meanwhile, but for those that Python's import looks into."""
    paths: list[str] = []
    is_on = True

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_on or event not in ("os.listdir", "os.scandir"):
            return
        caller = sys._getframe(1).f_code.co_filename
        path = arguments[0] if arguments else None
        if not caller.startswith("<frozen importlib") and (path is None or isinstance(path, (str, bytes))):
            paths.append(os.path.abspath(os.fsdecode(path or ".")))  # noqa: PTH100

    sys.addaudithook(audited)  # cannot be taken away
    try:
        yield paths
    finally:
        is_on = False


def folders_in(paths: Sequence[str], root: str) -> tuple[Folder, ...]:
    """What the system lists in each of those at or below ``root``, which is named by its path from there."""
    folders = []
    for path in dict.fromkeys(paths):
        name = os.path.relpath(path, root) if root else path
        try:
            names = [] if root and name.startswith("..") else os.listdir(path)  # noqa: PTH208 – in the system's order
        except OSError:
            continue
        if names and len(names) <= _MOST_ENTRIES:
            folders.append(Folder(name, len(names), _names_digest(names), _names_digest(sorted(names))))
    return tuple(folders)


def _names_digest(names: list[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(names).encode(errors="surrogateescape"))
