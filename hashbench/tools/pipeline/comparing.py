"""Two checks to a verdict: the stages, and for each that differs by itself the reasons. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hashbench.errors import HashbenchError
from hashbench.records import Divergence
from hashbench.results.environments import environment_changes
from hashbench.tools.pipeline import stages as stage_rules
from hashbench.tools.pipeline.checkfolder import Check
from hashbench.tools.pipeline.observed import MOMENTS, Digests, Loader, Observed, Worker
from hashbench.tools.pipeline.reasons import Evidence, Reason, decide
from hashbench.tools.pipeline.stages import DIFFERS, EQUAL, STAGES, Pair, Stage

_IMPORTED, _SEEDED, _LOADER_MADE, _MODEL_MADE = MOMENTS[1:5]
_ASKED, _FIRST_MADE = MOMENTS[-2:]

_SET_BY_USERS = MappingProxyType(
    {
        "order": ("seed", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"),
        "before transform": ("seed", "num_workers", "worker_init_fn"),
        "after transform": ("seed", "num_workers", "worker_init_fn"),
        "initial weights": ("seed",),
    }
)
"""Fields of :class:`Loader` that decide a stage; for the order also which generators were given."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A stage that differs by itself, and why."""

    stage: Stage
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``first`` is the name of the first stage that differs (the environment aside), empty where the pipeline repeats.
    ``findings`` has one entry for each stage that differs and does not merely follow from an earlier one."""

    stages: tuple[Stage, ...]
    findings: tuple[Finding, ...]
    first: str
    divergence: Divergence | None

    @property
    def repeats(self) -> bool:
        """Whether nothing differs that was seen, but perhaps the environment."""
        return not self.first


def compare(first: Check, second: Check, *, hash_order: bool | None = None) -> Verdict:
    """The verdict on two checks of what should be the same pipeline.

    Args:
        first, second: as :func:`checkfolder.read` gives them.
        hash_order: whether the first difference goes with the same hash seed, where the caller tried that.

    Raises:
        HashbenchError: they looked at different numbers of batches, or neither saw anything that can be compared.
    """
    one, other = first.seen, second.seen
    if one.batches.asked_for != other.batches.asked_for:
        raise HashbenchError(
            f"the checks are of {one.batches.asked_for} and {other.batches.asked_for} steps",
            consequence="nothing was compared",
            tip="Make both with the same `steps`.",
        )
    found, divergence = stage_rules.compared(one, other)
    if not any(stage.status in (DIFFERS, EQUAL) for stage in found[1:]):
        raise HashbenchError(
            f"neither {first.name} nor {second.name} saw anything that can be compared",
            consequence="that is not the same as equal",
            tip="Let the loader yield tensors, arrays, images or plain values.",
        )
    first_stage = stage_rules.first_that_differs(found)
    findings = tuple(
        Finding(stage, decide(_evidence(stage.name, first, second, divergence, hash_order)))
        for stage in found
        if stage.status == DIFFERS and stage.name != STAGES[0]
    )
    return Verdict(found, findings, first_stage.name if first_stage is not None else "", divergence)


def _evidence(
    stage: str, first: Check, second: Check, divergence: Divergence | None, hash_order: bool | None
) -> Evidence:
    one, other = first.seen, second.seen
    common: dict[str, object] = {
        "stage": stage,
        "imports": one.surroundings.imports != other.surroundings.imports
        and sorted(one.surroundings.imports) == sorted(other.surroundings.imports),
        "hash_order": _hash_order(stage, first, second) if hash_order is None else hash_order,
        "packages": _packages(one, other),
        "asked_otherwise": _asked_otherwise(stage, one.loader, other.loader),
    }
    facts = {
        "order": lambda: _of_order(one, other),
        "before transform": lambda: _of_samples(one, other, before=True),
        "after transform": lambda: _of_samples(one, other, before=False),
        "initial weights": lambda: _of_weights(one, other),
    }
    if stage in facts:
        common |= facts[stage]()
    elif divergence is not None:
        common |= {"origin": divergence.origin, "kernel": divergence.kernel or divergence.node}
    return Evidence(**common)  # type: ignore[arg-type]


def _asked_otherwise(stage: str, one: Loader, other: Loader) -> tuple[str, ...]:
    """What the user set to another value in the two: no difference that follows from it says anything else."""
    names = _SET_BY_USERS.get(stage, ())
    sides = [
        {name: getattr(loader, name) for name in names} | {"generators": sorted(loader.generators) or "none"}
        for loader in (one, other)
    ]
    compared = (*names, "generators") if "sampler" in names else names
    return tuple(f"{name} {sides[0][name]} / {sides[1][name]}" for name in compared if sides[0][name] != sides[1][name])


def _hash_order(stage: str, first: Check, second: Check) -> bool | None:
    """What the repetitions of the two checks and their hash seeds say."""
    tried = [check.repetition for check in (first, second) if check.repetition is not None]
    for repetition in tried:
        if repetition.first == stage and repetition.hash_order is not None:
            return repetition.hash_order
    seeds = [check.seen.surroundings.hash_seed for check in (first, second)]
    if seeds[0] == seeds[1]:
        return False
    by_us = all(check.seen.surroundings.hash_seed_by == "hashbench" for check in (first, second))
    return False if by_us and len(tried) == 2 and all(one.repeats for one in tried) else None


def _packages(one: Observed, other: Observed) -> str:
    sides = [seen.surroundings.machine.get("packages") for seen in (one, other)]
    mappings = [side if isinstance(side, Mapping) else {} for side in sides]
    changes = environment_changes([mappings[0]], [mappings[1]])
    return ", ".join(f"{change.key} {change.base or 'absent'} / {change.new or 'absent'}" for change in changes)


# ------------------------------------------------------------------------------------------------- single stages


def _of_order(one: Observed, other: Observed) -> dict[str, object]:
    indices = [stage_rules.indices_of(seen) for seen in (one, other)]
    same = None if None in indices else indices[0] == indices[1]
    lists = [None if seen.loader.listing is None else seen.loader.listing.files for seen in (one, other)]
    given = [seen.loader.generators for seen in (one, other)]
    facts: dict[str, object] = {
        "same_indices": same,
        "listing": None not in lists and lists[0] != lists[1],
        "folder": _folder(one, other),
        "no_generator": one.loader.draws_by_default
        if one.loader.draws_by_default == other.loader.draws_by_default
        else None,
        "given_moved": _apart(given[0], given[1]),
    }
    if same is False:
        moments = [seen.random_state.moments.get(_ASKED, {}) for seen in (one, other)]
        drew = one.random_state.drew(_ASKED, _FIRST_MADE)
        if one.loader.num_workers == 0:  # the transforms of the first batch drew here, too
            samples = [sample for batch in one.batches.batches[:1] for sample in batch.samples or ()]
            inside = {name for sample in samples for name in sample.drew}
            drew = tuple(name for name in drew if name not in inside or name == "torch")
        return facts | {"moved": _apart(moments[0], moments[1]), "drew": drew}
    return facts | _drawn_while(one, other, (MOMENTS[0], _IMPORTED), (_SEEDED, _LOADER_MADE))


def _folder(one: Observed, other: Observed) -> str:
    """A folder with the same names, that the system lists in another order."""
    known = {folder.path: folder for folder in other.loader.folders}
    for folder in one.loader.folders:
        twin = known.get(folder.path)
        if twin is not None and folder.as_set == twin.as_set and folder.in_order != twin.in_order:
            return "the folder of the files" if folder.path == "." else folder.path
    return ""


def _drawn_while(one: Observed, other: Observed, *spans: tuple[str, str]) -> dict[str, object]:
    """The generators that were drawn from between two moments, and those that were in another state before."""
    drew: dict[str, None] = {}
    moved: dict[str, None] = {}
    for begin, end in spans:
        drew |= dict.fromkeys(one.random_state.drew(begin, end))
        states = [seen.random_state.moments.get(begin, {}) for seen in (one, other)]
        moved |= dict.fromkeys(name for name in _apart(states[0], states[1]) if name in drew)
    return {"drew": tuple(drew), "moved": tuple(moved)}


def _of_samples(one: Observed, other: Observed, *, before: bool) -> dict[str, object]:
    pairs = stage_rules.samples_in_common(one, other) or ()
    pair = next((pair for pair in pairs if _differs(pair, before=before)), None)
    if pair is None:
        return {}
    steps = (None, None) if before else stage_rules.first_step(pair)
    names = [None if step is None else step.transform for step in steps]
    return {
        "transform": names[0] or "",
        "other_transforms": names[0] != names[1],
        "drew": pair.first.drew_outside if before else stage_rules.drawn_where_it_differs(pair),
        "moved": _apart(pair.first.generators or {}, pair.second.generators or {}),
        "same_files": None if pair.first.file_digests is None else pair.first.file_digests == pair.second.file_digests,
        "worker": pair.worker,
        **_of_worker(pair.worker, one.random_state.workers, other.random_state.workers),
    }


def _differs(pair: Pair, *, before: bool) -> bool:
    if before:
        contents = [(sample.before, sample.file_digests) for sample in (pair.first, pair.second)]
        return contents[0] != contents[1]
    return pair.first.after != pair.second.after


def _of_worker(number: int | None, one: tuple[Worker, ...], other: tuple[Worker, ...]) -> dict[str, object]:
    found = [next((worker for worker in side if worker.worker == number), None) for side in (one, other)]
    if found[0] is None or found[1] is None:
        return {}
    at_start = _apart(found[0].began, found[1].began)
    after = _apart(found[0].initialised, found[1].initialised)
    return {"moved_at_start": at_start, "moved_by_init": tuple(name for name in after if name not in at_start)}


def _of_weights(one: Observed, other: Observed) -> dict[str, object]:
    names = [stage_rules.weights_by_name(seen) or {} for seen in (one, other)]
    forms = [{name: word.partition(":")[0] for name, word in side.items()} for side in names]
    spans = ((MOMENTS[0], _IMPORTED), (_LOADER_MADE, _MODEL_MADE))
    return {"names_differ": forms[0] != forms[1], **_drawn_while(one, other, *spans)}


def _apart(one: Digests, other: Digests) -> tuple[str, ...]:
    """The generators whose states differ, of those that both sides have."""
    return tuple(name for name, state in one.items() if name in other and other[name] != state)
