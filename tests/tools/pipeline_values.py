"""What a check saw, written by hand: two batches of two samples from two workers, equal unless a test changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hashbench.records import OpRecord, Result, TensorDigest, Trace
from hashbench.tools.pipeline.observed import (
    MOMENTS,
    Batch,
    Batches,
    Check,
    Folder,
    Listing,
    Loader,
    Observed,
    Outputs,
    RandomState,
    Repetition,
    Sample,
    Step,
    Surroundings,
    Transform,
    Weights,
    Worker,
)

FILES = ("a.png", "b.png", "c.png", "d.png")
GENERATORS = {"python": "p0", "numpy": "n0", "torch": "t0"}


def sample(place: int, **changes: Any) -> Sample:
    """The sample at ``place`` of the listing; its one transform drew nothing."""
    plain = Sample(
        index=str(place),
        files=(FILES[place],),
        file_digests=(f"bytes of {FILES[place]}",),
        before=f"before {place}",
        after=f"after {place}",
        steps=(Step("dataset.transform Flip", f"after {place}", ()),),
        generators=GENERATORS,
    )
    return replace(plain, **changes)


def batches(*samples: Sample, **changes: Any) -> Batches:
    """Batches of two samples each; the digest of each says what is in it."""
    pairs = [samples[place : place + 2] for place in range(0, len(samples), 2)]
    made = tuple(
        Batch(number, " ".join(str(one.after) for one in pair), number % 2, pair) for number, pair in enumerate(pairs)
    )
    return replace(Batches(made, asked_for=2, exhausted=True), **changes)


def trace(output: str = "o0") -> Trace:
    """One op, and its output as the result."""
    digest = TensorDigest("float32", (2,), (1,), output)
    op = OpRecord("forward.0/model/aten.relu.default#0", "forward", 0, "model", "aten.relu.default", outputs=(digest,))
    return Trace((op,), results=(Result("output.0", digest, op.id),))


def loader(**changes: Any) -> Loader:
    plain = Loader(
        kind="torch.utils.data.dataloader.DataLoader",
        dataset="user.Images",
        length=4,
        batch_size=2,
        num_workers=2,
        shuffle=False,
        sampler="torch.utils.data.sampler.SequentialSampler",
        batch_sampler="torch.utils.data.sampler.BatchSampler",
        draws_by_default=False,
        generators={},
        seed=1,
        worker_init_fn=None,
        collate_fn="torch.utils.data._utils.collate.default_collate",
        start_method="fork",
        persistent_workers=False,
        drop_last=False,
        pin_memory=False,
        transforms=(Transform("dataset.transform Flip", "Flip()", 4, ()),),
        random_transforms=(),
        listing=Listing("dataset.files", "/images", FILES),
        folders=(Folder(".", 4, "order", "set"),),
    )
    return replace(plain, **changes)


def seen(**changes: Any) -> Observed:
    """A whole pipeline that repeats."""
    workers = tuple(Worker(number, GENERATORS, GENERATORS) for number in (0, 1))
    plain = Observed(
        surroundings=Surroundings({"python": "3.11"}, {"num_threads": "1"}, "5", "user", ("training",)),
        random_state=RandomState(dict.fromkeys(MOMENTS, GENERATORS), workers),
        loader=loader(),
        batches=batches(*map(sample, range(4))),
        weights=Weights({"weight": "float32[2]:w0"}, {}),
        outputs=Outputs({"output": "float32[2]:o0"}, {"output": ("0.5",)}, ("0.25",)),
        layers=(("model", "ReLU", "0", "", "2", "float32", "0.5", "0.0", "0.5", "0.5", "o0"),),
        trace=trace(),
    )
    return replace(plain, **changes)


def check(observed: Observed | None = None, *, repetition: Repetition | None = None, name: str = "check") -> Check:
    return Check(name, observed or seen(), repetition)
