"""From the evidence to a reason."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from hashbench.tools.pipeline.observed import IMPORT, LOADER, MAKE_LOADER, MAKE_MODEL
from hashbench.tools.pipeline.reasons import (
    FIXES,
    ModelFacts,
    OrderFacts,
    RandomDraw,
    SampleFacts,
    StageEvidence,
    decide,
)

TORCH = ("torch",)
DRAWN_BY_LOADER = RandomDraw(MAKE_LOADER, ("python",))
DRAWN = {"drew": TORCH, "moved": TORCH}


def evidence_of(stage: str, **facts: Any) -> StageEvidence:
    """Evidence whose facts of the order, the sample and the model are named without their kind."""
    for part, kind in (("order", OrderFacts), ("sample", SampleFacts), ("model", ModelFacts)):
        names = [field.name for field in dataclasses.fields(kind) if field.name in facts]
        facts[part] = kind(**{name: facts.pop(name) for name in names})
    return StageEvidence(stage, **facts)


order, before, after = (partial(evidence_of, stage) for stage in ("order", "before transform", "after transform"))
shuffled, listed = partial(order, same_indices=False), partial(order, same_indices=True, listing=True)
weights = partial(evidence_of, "initial weights")
TRUTH: dict[str, tuple[StageEvidence, str]] = {
    "other files": (evidence_of("file list"), "other files proven"),
    "files from a set": (evidence_of("file list", hash_order=True), "set order proven"),
    "a loader that was given a generator in one alone": (
        shuffled(moved=TORCH, asked_otherwise=("generators ['loader.generator'] / none",)),
        "asked otherwise proven",
    ),
    "another list of files, whatever else was asked for": (
        listed(folder="train", asked_otherwise=("shuffle True / False",)),
        "unsorted file listing proven",
    ),
    "weights drawn from another seed": (weights(**DRAWN, asked_otherwise=("seed 7 / 8",)), "asked otherwise proven"),
    "a random transform under another seed": (
        after(transform="Flip", **DRAWN, asked_otherwise=("seed 7 / 8",)),
        "asked otherwise proven",
    ),
    "other bytes, whatever the seed": (
        before(same_files=False, drew=TORCH, asked_otherwise=("seed 7 / 8",)),
        "other file content proven",
    ),
    "shuffled without a generator": (shuffled(no_generator=True, moved=TORCH), "unseeded shuffle proven"),
    "shuffled by a generator that was seeded otherwise": (
        shuffled(given_moved=("loader.generator",)),
        "unseeded shuffle proven",
    ),
    "a sampler of one's own that drew from Python's generator": (
        shuffled(draws=(RandomDraw(LOADER, ("python", "torch")),)),
        "unseeded shuffle likely",
    ),
    "another order though all generators agree": (shuffled(no_generator=True), "unknown order likely"),
    "a folder that the system lists otherwise": (listed(folder="train"), "unsorted file listing proven"),
    "a list that the dataset shuffled": (listed(draws=(DRAWN_BY_LOADER,)), "unseeded shuffle likely"),
    "batches of a list that was shuffled": (order(draws=(DRAWN_BY_LOADER,)), "unseeded shuffle likely"),
    "a list of random batches": (after(whole=LOADER, draws=(DRAWN_BY_LOADER,)), "unseeded loader likely"),
    "a list of batches, from nobody knows where": (after(whole=LOADER), "unknown content likely"),
    "a loader of one's own under another seed": (
        after(whole=LOADER, asked_otherwise=("seed 7 / 8",)),
        "asked otherwise likely",
    ),
    "a collate_fn that draws": (after(whole="collate_fn", **DRAWN), "random transform proven"),
    "a stream that draws": (after(whole="the dataset", **DRAWN), "random dataset proven"),
    "a transform that was made of a random number": (
        after(transform="Noise", drew=TORCH, draws=(DRAWN_BY_LOADER,)),
        "unseeded construction likely",
    ),
    "a dataset that was made of random numbers": (before(draws=(DRAWN_BY_LOADER,)), "unseeded construction likely"),
    "seen in one check alone": (order(one_sided=True), "seen once likely"),
    "a model in one check alone": (weights(one_sided=True), "other model proven"),
    "a list in another order, with other hash seeds": (listed(), "unsorted file listing likely, set order likely"),
    "a list in another order, whatever the hash seed": (listed(hash_order=False), "unsorted file listing likely"),
    "a list from a set": (order(listing=True, hash_order=True), "set order proven"),
    "an order of which nothing is known": (order(), "unknown order likely"),
    "an order from a set in code that calls hash()": (
        order(listing=True, hash_order=True, hash_calls=("a.py:3",)),
        "set order likely, hash of a text likely",
    ),
    "an order drawn from a generator that was seeded with hash()": (
        shuffled(hash_order=True, hash_calls=("a.py:3",), given_moved=("loader.generator",)),
        "hash of a text proven",
    ),
    "an order drawn from torch, which a package seeds with hash()": (
        shuffled(hash_order=True, no_generator=True, moved=TORCH),
        "hash of a text likely",
    ),
    "noise seeded with hash() of a name": (before(hash_order=True, hash_calls=("a.py:3",)), "hash of a text likely"),
    "labels numbered in the order of a set": (
        after(hash_order=True),
        "set order likely, hash of a text likely",
    ),
    "weights drawn from a generator that was seeded with hash()": (
        weights(hash_order=True, hash_calls=("a.py:3",), draws=(RandomDraw(MAKE_MODEL, TORCH),)),
        "hash of a text proven",
    ),
    "samples that do not follow the hash seed, in code that calls hash()": (
        before(hash_order=False, hash_calls=("a.py:3",)),
        "unknown content likely",
    ),
    "batches of a loader that seeds in between": (
        after(whole=LOADER, drew=TORCH, parted=(RandomDraw(LOADER, TORCH),)),
        "seeded inside likely",
    ),
    "weights of a model that seeds by itself": (
        weights(drew=TORCH, parted=(RandomDraw(MAKE_MODEL, TORCH),)),
        "seeded inside likely",
    ),
    "a sampler that seeds by itself": (order(parted=(RandomDraw(MAKE_LOADER, TORCH),)), "seeded inside likely"),
    "a random transform beside a part that seeds": (
        after(transform="Flip", **DRAWN, parted=(RandomDraw("Flip", TORCH),)),
        "random transform proven",
    ),
    "other bytes": (before(same_files=False), "other file content proven"),
    "a dataset that draws from a generator of its own": (
        before(drew=("dataset.rng",), moved=("dataset.rng",)),
        "random dataset proven",
    ),
    "another decoder": (before(packages="pillow 12 / 13"), "other packages likely"),
    "read otherwise, nobody knows why": (before(), "unknown content likely"),
    "a random transform in the main process": (after(transform="Flip", **DRAWN), "random transform proven"),
    "a random transform in a worker of another base seed": (
        after(transform="Flip", **DRAWN, worker=0, moved_at_start=TORCH),
        "random transform proven",
    ),
    "a worker that its init function seeds from entropy": (
        after(transform="Noise", drew=("numpy",), moved=("numpy",), worker=1, moved_by_init=("numpy",)),
        "worker seeds proven",
    ),
    "a worker in which something drew before": (after(transform="Noise", **DRAWN, worker=1), "random transform likely"),
    "drawn from a generator in the same state": (after(transform="Noise", drew=TORCH), "random transform likely"),
    "a transform that draws from nothing": (after(transform="Stamp"), "unknown content likely"),
    "other transforms": (after(other_transforms=True), "other transforms likely"),
    "other transforms by the order of imports": (
        after(other_transforms=True, imports=True, drew=TORCH),
        "import order likely",
    ),
    "imports in the order of a set": (
        after(other_transforms=True, imports=True, hash_order=True),
        "import order proven",
    ),
    "another order of imports beside a random transform": (
        after(transform="Flip", imports=True, **DRAWN),
        "random transform proven",
    ),
    "initialised unseeded": (weights(draws=(RandomDraw(MAKE_MODEL, TORCH),)), "unseeded initialisation proven"),
    "initialised at import": (weights(draws=(RandomDraw(IMPORT, TORCH),)), "unseeded initialisation likely"),
    "initialised before it is seeded, or not": (
        weights(draws=(RandomDraw(MAKE_MODEL, TORCH, seeded=True),)),
        "unseeded initialisation likely",
    ),
    "another architecture": (weights(names_differ=True), "other model proven"),
    "another checkpoint": (weights(drew=TORCH), "unknown weights likely"),
    "dropout": (evidence_of("first output", origin="rng", kernel="aten.bernoulli_"), "random model proven"),
    "a setting": (evidence_of("kernel", origin="settings", kernel="aten.mm"), "other settings proven"),
    "a kernel": (evidence_of("kernel", origin="kernel", kernel="aten.index_put_"), "kernel likely"),
    "other packages under the model": (evidence_of("kernel", packages="torch 2 / 3"), "other packages likely"),
    "a model that differs by itself": (evidence_of("first output"), "unknown model likely"),
    "an input that was changed later": (
        evidence_of("kernel", origin="input", kernel="aten.mm"),
        "changed later likely",
    ),
}


@pytest.mark.parametrize("case", TRUTH)
def test_the_evidence_decides(case: str) -> None:
    evidence, expected = TRUTH[case]

    reasons = decide(evidence)
    assert ", ".join(f"{reason.name} {reason.confidence}" for reason in reasons) == expected
    assert all(reason.because and reason.fix for reason in reasons)


def test_every_fix_belongs_to_a_reason_that_some_evidence_gives() -> None:
    assert {reason.name for evidence, _ in TRUTH.values() for reason in decide(evidence)} == set(FIXES)
