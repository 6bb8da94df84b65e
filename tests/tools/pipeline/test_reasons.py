"""From the evidence to a reason."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from hashbench.core.catalog import CAUSES
from hashbench.core.records import Divergence
from hashbench.tools.pipeline.evidence import ModelFacts, OrderFacts, SampleFacts, StageEvidence
from hashbench.tools.pipeline.observed import IMPORT, LOADER, MAKE_LOADER, MAKE_MODEL
from hashbench.tools.pipeline.pairs import Span
from hashbench.tools.pipeline.reasons import DIFFERENCES, decide

TORCH = ("torch",)


def span(code: str, *names: str, before: bool, after: bool) -> Span:
    """Code that drew from these generators, whose states differed before it, and after it."""
    states = [(dict.fromkeys(names, "a"), dict.fromkeys(names, "b" if apart else "a")) for apart in (before, after)]
    return Span(code, *states, names)


def drawn(code: str, *names: str) -> Span:
    return span(code, *names, before=True, after=True)


def diverged(code: str, *names: str) -> Span:
    return span(code, *names, before=False, after=True)


def diverging_at(origin: str, kernel: str) -> Divergence:
    return Divergence(origin, kernel, kernel, 0, "forward", 0, "", "", "the output differs")


DRAWN_BY_LOADER = drawn(MAKE_LOADER, "python")
DRAWN = {"here": (drawn("Flip", "torch"),)}
DREW = {"here": (span("Flip", "torch", before=False, after=False),)}


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
    "other files": (evidence_of("file list"), "different_files proven"),
    "files from a set": (evidence_of("file list", hash_order=True), "set_order proven"),
    "a loader that was given a generator in one alone": (
        shuffled(arguments=("generators ['loader.generator'] / none",)),
        "different_arguments proven",
    ),
    "another list of files, whatever else was asked for": (
        listed(folder="train", arguments=("shuffle True / False",)),
        "unsorted_listing proven",
    ),
    "weights drawn from another seed": (weights(**DRAWN, arguments=("seed 7 / 8",)), "different_arguments proven"),
    "a random transform under another seed": (
        after(transform="Flip", **DRAWN, arguments=("seed 7 / 8",)),
        "different_arguments proven",
    ),
    "other bytes, whatever the seed": (
        before(same_files=False, **DREW, arguments=("seed 7 / 8",)),
        "different_content proven",
    ),
    "shuffled without a generator": (shuffled(no_generator=True, default_moved=True), "unseeded_shuffle proven"),
    "shuffled by a generator that was seeded otherwise": (
        shuffled(given_moved=("loader.generator",)),
        "unseeded_shuffle proven",
    ),
    "a sampler of one's own that drew from Python's generator": (
        shuffled(here=(drawn(LOADER, "python", "torch"),)),
        "unseeded_shuffle likely",
    ),
    "another order though all generators agree": (shuffled(no_generator=True), "outside_value open"),
    "a folder that the system lists otherwise": (listed(folder="train"), "unsorted_listing proven"),
    "a list that the dataset shuffled": (listed(here=(DRAWN_BY_LOADER,)), "unseeded_shuffle likely"),
    "batches of a list that was shuffled": (order(here=(DRAWN_BY_LOADER,)), "unseeded_shuffle likely"),
    "a list of random batches": (after(whole=LOADER, here=(DRAWN_BY_LOADER,)), "unseeded_loader likely"),
    "a list of batches, from nobody knows where": (after(whole=LOADER), "outside_value open"),
    "a loader of one's own under another seed": (
        after(whole=LOADER, arguments=("seed 7 / 8",)),
        "different_arguments likely",
    ),
    "a collate_fn that draws": (after(whole="collate_fn", **DRAWN), "random_transform proven"),
    "a stream that draws": (after(whole="the dataset", **DRAWN), "random_dataset proven"),
    "a transform that was made of a random number": (
        after(transform="Noise", **DREW, earlier=(DRAWN_BY_LOADER,)),
        "unseeded_construction likely",
    ),
    "a dataset that was made of random numbers": (before(earlier=(DRAWN_BY_LOADER,)), "unseeded_construction likely"),
    "seen in one check alone": (order(one_sided=True), "recorded_once likely"),
    "a model in one check alone": (weights(one_sided=True), "different_model proven"),
    "a list in another order, with other hash seeds": (listed(), "unsorted_listing likely, set_order likely"),
    "a list in another order, whatever the hash seed": (listed(hash_order=False), "unsorted_listing likely"),
    "a list from a set": (order(listing=True, hash_order=True), "set_order proven"),
    "an order of which nothing is known": (order(), "outside_value open"),
    "an order from a set in code that calls hash()": (
        order(listing=True, hash_order=True, hash_calls=("a.py:3",)),
        "set_order likely, string_hash likely",
    ),
    "an order drawn from a generator that was seeded with hash()": (
        shuffled(hash_order=True, hash_calls=("a.py:3",), given_moved=("loader.generator",)),
        "string_hash proven",
    ),
    "an order drawn from torch, which a package seeds with hash()": (
        shuffled(hash_order=True, no_generator=True, default_moved=True),
        "string_hash likely",
    ),
    "noise seeded with hash() of a name": (before(hash_order=True, hash_calls=("a.py:3",)), "string_hash likely"),
    "labels numbered in the order of a set": (
        after(hash_order=True),
        "set_order likely, string_hash likely",
    ),
    "weights drawn from a generator that was seeded with hash()": (
        weights(hash_order=True, hash_calls=("a.py:3",), here=(drawn(MAKE_MODEL, "torch"),)),
        "string_hash proven",
    ),
    "samples that do not follow the hash seed, in code that calls hash()": (
        before(hash_order=False, hash_calls=("a.py:3",)),
        "outside_value open",
    ),
    "batches of a loader that seeds in between": (
        after(whole=LOADER, here=(diverged(LOADER, "torch"),)),
        "reseeded likely",
    ),
    "weights of a model that seeds by itself": (
        weights(here=(diverged(MAKE_MODEL, "torch"),)),
        "reseeded likely",
    ),
    "a sampler that seeds by itself": (order(here=(diverged(MAKE_LOADER, "torch"),)), "reseeded likely"),
    "a random transform beside a part that seeds": (
        after(transform="Flip", **DRAWN, earlier=(diverged(MAKE_LOADER, "numpy"),)),
        "random_transform proven",
    ),
    "other bytes": (before(same_files=False), "different_content proven"),
    "a dataset that draws from a generator of its own": (
        before(here=(drawn("the dataset", "dataset.rng"),)),
        "random_dataset proven",
    ),
    "another decoder": (before(packages="pillow 12 / 13"), "different_packages likely"),
    "read otherwise, nobody knows why": (before(), "outside_value open"),
    "a random transform in the main process": (after(transform="Flip", **DRAWN), "random_transform proven"),
    "a random transform in a worker of another base seed": (
        after(transform="Flip", **DRAWN, worker=0, moved_at_start=TORCH),
        "random_transform proven",
    ),
    "a worker that its init function seeds from entropy": (
        after(transform="Noise", here=(drawn("Noise", "numpy"),), worker=1, moved_by_init=("numpy",)),
        "worker_seeds proven",
    ),
    "a worker in which something drew before": (after(transform="Noise", **DRAWN, worker=1), "random_transform likely"),
    "drawn from a generator in the same state": (after(transform="Noise", **DREW), "random_transform likely"),
    "a transform that draws from nothing": (after(transform="Stamp"), "outside_value open"),
    "other transforms": (after(different_transforms=True), "different_transforms likely"),
    "other transforms by the order of imports": (
        after(different_transforms=True, imports=True, **DREW),
        "import_order likely",
    ),
    "imports in the order of a set": (
        after(different_transforms=True, imports=True, hash_order=True),
        "import_order proven",
    ),
    "another order of imports beside a random transform": (
        after(transform="Flip", imports=True, **DRAWN),
        "random_transform proven",
    ),
    "initialised unseeded": (weights(here=(drawn(MAKE_MODEL, "torch"),)), "initial_state proven"),
    "initialised at import": (weights(here=(drawn(IMPORT, "torch"),)), "initial_state likely"),
    "initialised before it is seeded, or not": (
        weights(here=(span(MAKE_MODEL, "torch", before=True, after=False),)),
        "initial_state likely",
    ),
    "another architecture": (weights(names_differ=True), "different_model proven"),
    "another checkpoint": (weights(**DREW), "initial_state open"),
    "dropout": (evidence_of("first output", divergence=diverging_at("rng", "aten.bernoulli_")), "rng proven"),
    "a setting": (evidence_of("kernel", divergence=diverging_at("settings", "aten.mm")), "global_settings proven"),
    "a kernel": (evidence_of("kernel", divergence=diverging_at("kernel", "aten.index_put_")), "unknown open"),
    "other packages under the model": (evidence_of("kernel", packages="torch 2 / 3"), "different_packages likely"),
    "a model that differs by itself": (evidence_of("first output"), "unknown open"),
    "an input that was changed later": (
        evidence_of("kernel", divergence=diverging_at("input", "aten.mm")),
        "modified_later likely",
    ),
}


@pytest.mark.parametrize("case", TRUTH)
def test_the_evidence_decides(case: str) -> None:
    evidence, expected = TRUTH[case]

    reasons = decide(evidence)
    assert ", ".join(f"{reason.cause} {reason.confidence}" for reason in reasons) == expected
    assert all(reason.because and reason.advice for reason in reasons)


def test_every_cause_of_data_and_every_difference_follows_from_some_evidence() -> None:
    decided = {reason.cause for evidence, _ in TRUTH.values() for reason in decide(evidence)}
    assert {name for name, cause in CAUSES.items() if cause.of_data} | set(DIFFERENCES) <= decided
    assert {name for name, cause in CAUSES.items() if cause.code} == decided & set(CAUSES)
