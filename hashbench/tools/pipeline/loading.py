"""The user's loader: what it is made of, and its first batches, watched while they are made."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from hashbench.tools.pipeline.anatomy import dissect, listing_of
from hashbench.tools.pipeline.contents import content_digest
from hashbench.tools.pipeline.observed import MOMENTS, Batch, Batches, Folder, Loader, Sample, Transform, Worker
from hashbench.tools.pipeline.recording import MAIN_PROCESS, Watch, WatchedCollate, WatchedInit, matched, read_notes

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
ASKED, FIRST_MADE = MOMENTS[-2:]
_MOST_ENTRIES = 1_000_000
_NOT_LOADER = "the loader is no torch.utils.data.DataLoader, so only its batches are seen"


@dataclass(frozen=True, slots=True)
class Made:
    """The batches themselves, for the model, and what was seen of their making."""

    batches: tuple[Any, ...]
    seen: Batches
    workers: tuple[Worker, ...]


def first_batches(
    loader: Any, *, steps: int, folder: Path, modules: tuple[str, ...], note: Callable[[str], None]
) -> Made:
    """The first ``steps`` batches of ``loader``. ``note`` is called with each of the moments that come
    by meanwhile.

    Raises:
        Exception: whatever the loader raises.
    """
    watch = Watch(folder, modules=modules)
    received: list[Any] = []
    digests: list[str | None] = []
    exhausted = False
    with _watched(loader, watch):
        note(ASKED)
        iterator = iter(loader)
        while len(received) < steps:
            try:
                with _seen_here(watch):
                    batch = next(iterator)
            except StopIteration:
                exhausted = True
                break
            if not received:
                note(FIRST_MADE)
            received.append(batch)
            digests.append(content_digest(batch))
        del iterator  # ends the workers
    workers, notes = read_notes(folder)
    batches = _with_notes(digests, matched(digests, notes))
    used = {batch.worker for batch in batches}
    seen = Batches(batches, steps, exhausted, _absent(loader, batches, digests))
    return Made(tuple(received), seen, tuple(worker for worker in workers if worker.worker in used))


@contextlib.contextmanager
def _watched(loader: Any, watch: Watch) -> Iterator[None]:
    """The loader with its two functions wrapped, put back at the end."""
    if not isinstance(loader, DataLoader):
        yield
        return
    collate, initialise = loader.collate_fn, loader.worker_init_fn
    loader.collate_fn = WatchedCollate(collate, watch, batched=loader.batch_sampler is not None)
    if loader.num_workers:
        loader.worker_init_fn = WatchedInit(initialise, watch)
    else:
        watch.begin(MAIN_PROCESS, loader.dataset)
    try:
        yield
    finally:
        loader.collate_fn, loader.worker_init_fn = collate, initialise


@contextlib.contextmanager
def _seen_here(watch: Watch) -> Iterator[None]:
    if watch.recorder is None:
        yield
        return
    watch.recorder.start()
    try:
        yield
    finally:
        watch.recorder.stop()


def _with_notes(digests: list[str | None], notes: list[Any]) -> tuple[Batch, ...]:
    found = []
    for number, (digest, note) in enumerate(zip(digests, notes, strict=True)):
        if note is None:
            found.append(Batch(number, digest))
        else:
            found.append(Batch(number, digest, note.worker, note.samples))
    return tuple(found)


def _absent(loader: Any, batches: tuple[Batch, ...], digests: list[str | None]) -> dict[str, str]:
    """Why what is missing from the batches is missing."""
    found = {}
    samples = [sample for batch in batches for sample in batch.samples or ()]
    if any(digest is None for digest in digests):
        found["digest"] = "a batch holds something of a kind that cannot be hashed"
    if not isinstance(loader, DataLoader):
        return found | dict.fromkeys(("samples", "files", "before", "after"), _NOT_LOADER)
    if any(batch.samples is None for batch in batches):
        found["samples"] = "batches could not be told apart, or were changed after they were collated"
    reason = "no file was opened by Python while a sample was made (C code opens files unseen)"
    if any(sample.index is None for sample in samples):
        whole = "is iterable" if isinstance(loader.dataset, IterableDataset) else "makes whole batches"
        reason = f"the dataset {whole}, so that the making of a single sample is not seen"
        found["index"] = reason
    if any(sample.files is None for sample in samples):
        found["files"] = reason
    if any(sample.before is None for sample in samples):
        why = "no transform was seen at work, or it got something that cannot be hashed"
        found["before"] = found.get("index", why)
    if any(sample.after is None for sample in samples):
        found["after"] = "a sample holds something of a kind that cannot be hashed"
    return found


# --------------------------------------------------------------------------------------------------- the facts


def facts_of(loader: Any, *, seed: int, folders: tuple[Folder, ...], batches: Batches, given: dict[str, str]) -> Loader:
    """What the loader is made of. ``given``: :func:`given_generators`, of before the first batch."""
    is_torchs = isinstance(loader, DataLoader)
    dataset = getattr(loader, "dataset", None)
    samples = [sample for batch in batches.batches for sample in batch.samples or ()]
    transforms = _transforms(dataset, samples)
    listing = None if dataset is None else listing_of(dataset)
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    absent = {} if is_torchs else {"loader": _NOT_LOADER}
    if listing is None:
        absent["listing"] = "the dataset holds no list of files as long as it is itself"
    if transforms is None:
        absent["transforms"] = "no transform was found in the dataset"
    return Loader(
        kind=_kind(loader),
        dataset=_kind(dataset),
        length=_length(dataset),
        batch_size=getattr(loader, "batch_size", None) if is_torchs else None,
        num_workers=loader.num_workers if is_torchs else 0,
        shuffle=_shuffles(_sampler_of(loader)) if is_torchs else None,
        sampler=_kind(sampler),
        batch_sampler=_kind(batch_sampler),
        draws_by_default=_draws_by_default(loader) if is_torchs else None,
        generators=given,
        seed=seed,
        worker_init_fn=_kind(getattr(loader, "worker_init_fn", None)) or None,
        collate_fn=_kind(getattr(loader, "collate_fn", None)) or None,
        start_method=_start_method(loader) if is_torchs else None,
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
        drop_last=bool(getattr(loader, "drop_last", False)),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        transforms=transforms,
        random_transforms=None if transforms is None else tuple(one.name for one in transforms if one.is_random),
        listing=listing,
        folders=folders,
        absent=absent,
    )


def given_generators(loader: Any) -> dict[str, str]:
    """The states of the generators that the loader and its samplers hold, by name."""
    found = {}
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    for name, owner in (("loader", loader), ("sampler", sampler), ("batch_sampler", batch_sampler)):
        for attribute, value in list(getattr(owner, "__dict__", {}).items()):
            if is_generator(value):
                found[f"{name}.{attribute}"] = state_digest(value)
    return found


def _transforms(dataset: Any, samples: list[Sample]) -> tuple[Transform, ...] | None:
    """Those that were found in the dataset, and those that were seen at work."""
    texts = {} if dataset is None else dissect(dataset).texts
    found = []
    names = dict.fromkeys([*texts, *(step.transform for sample in samples for step in sample.steps or ())])
    for name in names:
        steps = [step for sample in samples for step in sample.steps or () if step.transform == name]
        drew = sorted({generator for step in steps for generator in step.drew})
        if steps or name in texts:
            found.append(Transform(name, texts.get(name, name), len(steps), tuple(drew)))
    seen = [one for one in found if one.calls]
    return tuple(seen) if seen else None


def _shuffles(sampler: Any) -> bool | None:
    if isinstance(sampler, _SHUFFLING):
        return True
    return False if isinstance(sampler, SequentialSampler) else None


def _draws_by_default(loader: DataLoader[Any]) -> bool | None:
    """See :class:`~hashbench.tools.pipeline.observed.Loader`."""
    sampler = _sampler_of(loader)
    if isinstance(sampler, _SHUFFLING):
        return sampler.generator is None
    return False if isinstance(sampler, SequentialSampler) else None


def _sampler_of(loader: DataLoader[Any]) -> Any:
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


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


class FolderWatch:
    """Notes the folders that are listed while it is entered, but for those that Python's import looks into."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        self._is_on = False

    def __enter__(self) -> FolderWatch:
        sys.addaudithook(self._audited)
        self._is_on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or event not in ("os.listdir", "os.scandir"):
            return
        caller = sys._getframe(1).f_code.co_filename
        path = arguments[0] if arguments else None
        if not caller.startswith("<frozen importlib") and (path is None or isinstance(path, (str, bytes))):
            self._paths[os.path.abspath(os.fsdecode(path or "."))] = None  # noqa: PTH100

    def folders(self, root: str) -> tuple[Folder, ...]:
        """What the system lists in each of those at or below ``root``, which is named by its path from there."""
        found = []
        for path in self._paths:
            inside = not os.path.relpath(path, root).startswith("..") if root else True
            try:
                names = os.listdir(path) if inside else []  # noqa: PTH208 – in the system's own order
            except OSError:
                continue
            if names and len(names) <= _MOST_ENTRIES:
                name = os.path.relpath(path, root) if root else path
                found.append(Folder(name, len(names), _names_digest(names), _names_digest(sorted(names))))
        return tuple(found)


def _names_digest(names: list[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(names).encode(errors="surrogateescape"))
