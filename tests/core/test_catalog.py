"""The vocabulary: words, kinds and letters of statuses, remedies of causes, places of experiments."""

from __future__ import annotations

import pytest

from hashbench.core.catalog import (
    CAUSES,
    EXPERIMENTS,
    LATENT,
    LETTERS,
    OUT_OF_MEMORY,
    REPEATED,
    STATUSES,
    WRITTEN,
    Cause,
    Experiment,
    Kind,
    Perturbation,
    Remedy,
    Role,
    Status,
    family_of,
    kind_of,
    letter_of,
    named_by,
    places,
    sentence_of,
    status_of,
)


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_a_remedy_names_experiments_that_exist(cause: Cause) -> None:
    for remedy in (*cause.remedies, *cause.sources):
        assert set(remedy.tests) <= set(EXPERIMENTS)
    assert all(remedy.clause[0].islower() for remedy in cause.remedies)
    assert "{" not in cause.advice.format(named=cause.unnamed)


@pytest.mark.parametrize("status", WRITTEN)
def test_every_written_word_has_its_status(status: str) -> None:
    word = status.replace("<n>", "16")
    found = status_of(word)
    assert found is STATUSES[status]
    assert (kind_of(word), letter_of(word)) == (found.kind, found.letter)


@pytest.mark.parametrize(
    ("word", "kind", "letter"),
    [
        pytest.param("", Kind.ABSENT, "", id="no row"),
        pytest.param("eager_fail", Kind.FAIL, "F", id="a word of dynamo alone"),
        pytest.param("fail_batch_invariance_at_", Kind.FAIL, "F", id="no batch size"),
        pytest.param("fail_batch_invariance_at_04", Kind.FAIL, "F", id="a batch size with a leading zero"),
        pytest.param("pass_4", Kind.FAIL, "F", id="a batch size where none belongs"),
    ],
)
def test_other_words_are_absent_or_fail(word: str, kind: Kind, letter: str) -> None:
    assert (status_of(word), kind_of(word), letter_of(word)) == (None, kind, letter)


def test_a_batch_size_is_written_and_read_back() -> None:
    assert Status.BATCH_DIFFERS.at(4) == "fail_batch_invariance_at_4"
    assert family_of("fail_batch_invariance_at_4") == Status.BATCH_DIFFERS
    assert family_of(Status.BATCH_DIFFERS) == ""


def test_each_kind_is_fine_or_trouble_or_absent() -> None:
    assert {kind for kind in Kind if kind.is_fine} == {Kind.PASS, Kind.SKIP}
    assert {kind for kind in Kind if kind.is_trouble} == {Kind.DIFFER, Kind.LATENT, Kind.FAIL}
    assert {kind for kind in Kind if kind.has_cause} < {kind for kind in Kind if kind.is_trouble}


@pytest.mark.parametrize("status", Status)
def test_failures_have_a_remedy_and_others_none(status: Status) -> None:
    assert bool(status.remedy) == (status.kind is Kind.FAIL)
    assert status.ran_out_of_memory == (status in OUT_OF_MEMORY) == status.endswith("OOM")


def test_a_letter_means_one_thing() -> None:
    assert all(LETTERS[status.letter] == status.short for status in Status)


def test_clauses_are_joined_to_a_sentence() -> None:
    two = (Remedy("use one thread"), Remedy("sort first"))
    assert sentence_of(two) == "Use one thread, or sort first"
    assert [named_by(two[:1]), named_by(two), named_by((*two, Remedy("wait")))] == [
        "use one thread",
        "use one thread or sort first",
        "use one thread, sort first or wait",
    ]


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_an_experiment_repeats_what_is_known(experiment: Experiment) -> None:
    assert set(experiment.on) <= set(REPEATED)
    assert not experiment.cause or experiment.cause in CAUSES
    assert experiment.has_unit == (experiment.role in (Role.BASE, Role.PROCESS))
    assert experiment.runs_on("cuda") == ("cuda" in experiment.devices or not experiment.devices)


def test_places_are_grouped_by_what_is_repeated() -> None:
    some = [EXPERIMENTS["repeat"], EXPERIMENTS["poison"], EXPERIMENTS["pair"]]
    assert places(some) == (("repeat", "call"), ("poison", "call"), ("poison", "pair"), ("pair", "pair"))
    assert places(some, "pair") == (("poison", "pair"), ("pair", "pair"))


def test_only_perturbations_that_must_not_matter_make_a_model_latent() -> None:
    assert {*Perturbation} - LATENT == {Perturbation.CLOCK, Perturbation.ENTROPY}


def test_compilations_have_every_change_of_the_compiler() -> None:
    fallbacks = pytest.importorskip("hashbench.extensions.compiled.fallbacks")
    known = {name for name, experiment in EXPERIMENTS.items() if "compilation" in experiment.on}
    assert {change.name for change in fallbacks.CHANGES} == known
