"""Watching a loader changes nothing: neither batches nor generators nor the loader."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchvision import transforms

from hashbench.core.run.rng import global_state_digests, preserved_rng, reset_rng_state
from hashbench.tools.pipeline.observed import BatchRecord
from hashbench.tools.pipeline.recording import content_digest, first_batches, matched
from tests.tools.pipeline.pipeline_helpers import PIPELINES


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PIPELINES))
    import common

    yield common
    del sys.modules["common"]


def noisy(image: Any) -> torch.Tensor:
    noise = random.random() + float(np.random.normal()) + float(torch.rand(()))
    return transforms.functional.to_tensor(image) + noise


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_and_generators_are_those_of_a_loader_that_nobody_watches(
    workers: int, common: Any, tmp_path: Path
) -> None:
    images = common.draw_images(tmp_path / "images")
    augment = transforms.Compose([transforms.RandomHorizontalFlip(), noisy])
    loader = common.load(common.sorted_images(str(images), augment), shuffle=True, num_workers=workers)
    before = dict(vars(loader))
    with preserved_rng():
        reset_rng_state(3)
        plain = [batch for _, batch in zip(range(2), loader, strict=False)]
        plain_states = global_state_digests()
        reset_rng_state(3)
        received, seen, _ = first_batches(loader, steps=2, modules=(), note=lambda _moment: None)
        watched_states = global_state_digests()
    assert watched_states == plain_states
    assert [content_digest(batch) for batch in received] == [content_digest(batch) for batch in plain]
    assert dict(vars(loader)) == before
    assert sys.getprofile() is None
    samples = [sample for batch in seen.batches for sample in batch.samples or ()]
    assert all(sample.drew == ("python", "numpy", "torch") for sample in samples)


class Read(Dataset[torch.Tensor]):
    """Reads a file for every sample."""

    def __init__(self, *files: str) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.files[index], "rb") as file:  # noqa: PTH123
            return torch.tensor(len(file.read(4)))


def test_files_in_shared_memory_are_files_and_devices_are_none(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no shared memory that can be written")
    with tempfile.NamedTemporaryFile(dir=memory) as shared:
        node = tmp_path / "node"
        node.symlink_to("/dev/zero")
        loader = DataLoader(Read(shared.name, "/dev/urandom", str(node)), batch_size=1)
        _, seen, _ = first_batches(loader, steps=3, modules=(), note=lambda _moment: None)
    assert [sample.files for sample in seen.samples] == [(shared.name,), None, None]


@pytest.mark.slow
def test_a_worker_that_is_spawned_is_watched_too() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=1, multiprocessing_context="spawn")

    _, seen, _ = first_batches(loader, steps=3, modules=(), note=lambda _moment: None)
    assert [batch.worker for batch in seen.batches] == [0, 0, 0]
    assert [sample.index for batch in seen.batches for sample in batch.samples or ()] == list("012345")


class Private:
    """Batches that are drawn from the global generator, from one that the loader holds, and from a late one."""

    def __init__(self, seed: int) -> None:
        self.rng, self.draw = random.Random(seed), random.random

    def __iter__(self) -> Any:
        yield torch.tensor(self.draw())
        late = np.random.default_rng(3)
        yield torch.tensor(self.rng.random())
        yield torch.tensor(late.random())


def generated(seed: int) -> Any:
    yield from Private(seed)


@pytest.mark.parametrize(
    "make", [Private, generated, lambda seed: list(Private(seed)), lambda seed: iter([seed, 2, 3])]
)
def test_an_iterable_of_any_kind_is_watched_without_a_change(make: Any) -> None:
    with preserved_rng():
        reset_rng_state(3)
        plain = list(make(5))
        plain_states = global_state_digests()
        reset_rng_state(3)
        received, seen, workers = first_batches(make(5), steps=4, modules=(), note=lambda _moment: None)
        watched_states = global_state_digests()
    assert watched_states == plain_states
    assert [content_digest(batch) for batch in received] == [content_digest(batch) for batch in plain]
    assert [batch.digest for batch in seen.batches] == [content_digest(batch) for batch in plain]
    assert (seen.exhausted, seen.asked_for, workers) == (True, 4, ())
    assert {"samples", "index", "files", "before", "after"} <= set(seen.absent)


def test_what_a_loader_of_ones_own_drew_from_is_noted_batch_by_batch() -> None:
    _, seen, _ = first_batches(Private(5), steps=3, modules=(), note=lambda _moment: None)
    assert [batch.drew for batch in seen.batches] == [
        ("python",),
        ("loader.rng", "iterator.late"),
        ("iterator.late",),
    ]
    assert all(batch.generators is not None and set(batch.drew) <= set(batch.generators) for batch in seen.batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_collate_fn_and_a_stream_drew_is_noted_with_the_batch(workers: int) -> None:
    def drawing(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample[0] for sample in samples]) + random.random()

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return (float(np.random.normal()) for _ in range(4))

    tensors = TensorDataset(torch.arange(4.0))
    for loader, drew in (
        (DataLoader(tensors, batch_size=2, num_workers=workers, collate_fn=drawing), ("python",)),
        (DataLoader(Stream(), batch_size=2, num_workers=workers), ("numpy",)),
        (DataLoader(tensors, batch_size=2, num_workers=workers), ()),
    ):
        _, seen, _ = first_batches(loader, steps=2, modules=(), note=lambda _moment: None)
        assert [batch.drew for batch in seen.batches] == [drew, drew]


def note(worker: int, digest: str) -> BatchRecord:
    return BatchRecord(0, digest, worker, ())


def test_batches_are_matched_by_content_and_by_turns() -> None:
    made = {0: [note(0, "a"), note(0, "c"), note(0, "e")], 1: [note(1, "b"), note(1, "d")]}

    in_turns = matched(["a", "b", "c", "d"], made)
    one_worker_had_no_more = matched(["a", "b", "c", "d", "e"], made)
    unknown = matched(["z"], made)
    assert [batch.worker for batch in in_turns] == [0, 1, 0, 1]
    assert [batch.worker for batch in one_worker_had_no_more] == [0, 1, 0, 1, 0]
    assert [(batch.number, batch.digest) for batch in one_worker_had_no_more] == list(enumerate("abcde"))
    assert unknown == (BatchRecord(0, "z"),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), np.ones(2)),
        ({"a": 1}, {"a": 2}),
        ([1, "x"], (1, "x")),
        ([[1], 2], [1, [2]]),
        ("text", b"text"),
        (1, True),
    ],
    ids=str,
)
def test_contents_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert content_digest(one) != content_digest(other)
    assert content_digest(one) == content_digest(one)


def test_an_image_is_hashed_by_its_pixels_and_one_that_is_not_decoded_is_left_alone(tmp_path: Path) -> None:
    from PIL import Image

    drawn = Image.new("RGB", (4, 4), "red")
    drawn.save(tmp_path / "red.png")
    with Image.open(tmp_path / "red.png") as lazy:
        assert content_digest(lazy) is None
        assert lazy.tile  # still not decoded
        lazy.load()
        assert content_digest(lazy) == content_digest(drawn) != content_digest(Image.new("RGB", (4, 4), "blue"))


def test_what_cannot_be_hashed_has_no_digest() -> None:
    assert content_digest(object()) is None
    assert content_digest([torch.ones(1), object()]) is None
