"""Compare two checks: the stages that differ, and why; as text and JSON. Pure: imports no torch.

::

    order             differs  indices: at 0 0 / 3; files in the batches: at 0 dark_00.png / light_03.png
    before transform  equal

``file list`` compares the files that the dataset lists, else those that were opened; ``order`` the dataset's own list,
the indices that the sampler asked for and the files in the batches, else the positions of equal samples or batches;
``before transform`` samples of the same file (else of the same index) as the first transform received them; ``after
transform`` the same samples as they were collated, and whole batches unless their order differs. A value that only one
check recorded differs: absent is never equal. A value that neither recorded is ``unseen``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from types import MappingProxyType

from hashbench.catalog import Origin
from hashbench.divergence import find as find_divergence
from hashbench.errors import HashbenchError
from hashbench.io import to_json
from hashbench.records import Divergence
from hashbench.report.compare import environment_changes
from hashbench.text import a_few, one_line
from hashbench.tools.pipeline.observed import (
    IMPORT,
    LOADER,
    MAKE_LOADER,
    MAKE_MODEL,
    MOMENTS,
    SPANS,
    Batch,
    Check,
    Observed,
    Sample,
    Step,
    moved,
)
from hashbench.tools.pipeline.reasons import SEEDS, Draw, Evidence, Reason, Seeding, decide
from hashbench.trace.file import OTHER_OPS

STAGES = (
    *("environment", "file list", "order", "before transform", "after transform"),
    *("initial weights", "first output", "kernel"),
)
EQUAL, DIFFERS, UNSEEN, FOLLOWS = "equal", "differs", "unseen", "follows"

_ASKED = SPANS[LOADER][0]
_IMPORTED, _SEEDED = MOMENTS[1:3]
_SHOWN = 3
_SET_BY_USERS = MappingProxyType(
    {
        "order": ("seed", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"),
        "before transform": ("seed", "num_workers", "worker_init_fn"),
        "after transform": ("seed", "num_workers", "worker_init_fn"),
        "initial weights": ("seed",),
    }
)
"""Fields of :class:`Loader` that decide a stage; for the order also which generators were passed."""
_OF_MODEL = ("after transform", "initial weights")
"""The stages that compare the inputs of a model."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The verdict on one stage.

    Attributes:
        name: one of :data:`STAGES`.
        status: ``equal``, ``differs``, ``unseen``, or ``follows``: differs as a consequence of an earlier stage.
        detail: the difference in words, or why the stage is unseen.
        one_sided: it differs because only one of the checks recorded it.
    """

    name: str
    status: str
    detail: str = ""
    one_sided: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A stage that differs independently of earlier ones, with its reasons."""

    stage: Stage
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of two checks.

    Attributes:
        stages: all stages in order, the environment first.
        findings: one entry for each stage that differs and does not follow from an earlier one.
        first: the first stage that differs; empty where the pipeline repeats. Never the environment: where nothing else
            differs, it had no effect.
        divergence: the first divergence of the two traces.
        seeding: the generators that the findings drew from and that the pipeline does not seed, if any.
    """

    stages: tuple[Stage, ...]
    findings: tuple[Finding, ...]
    first: str
    divergence: Divergence | None
    seeding: Seeding | None = None

    @property
    def repeats(self) -> bool:
        """Whether every recorded stage is equal, the environment aside."""
        return not self.first


def compare(first: Check, second: Check, *, hash_order: bool | None = None) -> Verdict:
    """Compare two checks of the same pipeline.

    Args:
        first, second: as returned by :func:`observed.read`.
        hash_order: whether the first difference disappears with an equal hash seed, where the caller tested that.

    Raises:
        HashbenchError: they recorded different numbers of batches, or neither recorded anything that can be compared.
    """
    seen = first.seen, second.seen
    steps = [side.batches.asked_for for side in seen]
    if steps[0] != steps[1]:
        raise HashbenchError(
            f"the checks are of {steps[0]} and {steps[1]} steps",
            consequence="nothing was compared",
            tip="Make both with the same `steps`.",
        )
    pairs = _samples_in_common(*seen)
    stages, divergence = _stages(*seen, pairs)
    if all(stage.status == UNSEEN for stage in stages):
        raise HashbenchError(
            f"neither {first.name} nor {second.name} saw anything that can be compared",
            consequence="that is not the same as equal",
            tip="Let the loader yield tensors, arrays, images or plain values.",
        )
    findings, used = [], []
    for stage in stages:
        if stage.status == DIFFERS:
            tried = _hash_order(stage.name, first, second) if hash_order is None else hash_order
            evidence = _evidence(stages, stage, *seen, pairs or (), divergence)
            used.append(evidence)
            findings.append(Finding(stage, decide(replace(evidence, hash_order=tried))))
    all_stages = (_environment(*seen), *stages)
    stage_name = findings[0].stage.name if findings else ""
    return Verdict(all_stages, tuple(findings), stage_name, divergence, _missing_seeding(used, *seen))


# ------------------------------------------------------------------------------------------------------ samples


@dataclass(frozen=True, slots=True)
class _Pair:
    """The same sample in two checks, and its batch in the first."""

    name: str
    first: Sample
    second: Sample
    batch: Batch

    def __str__(self) -> str:
        worker = "" if self.batch.worker is None else f", worker {self.batch.worker}"
        return f"{self.name} (batch {self.batch.number}{worker})"

    def differs(self, *, before: bool) -> bool:
        """Return True if the input of the first transform differs (``before``), else if the collated sample does."""
        if before:
            return _contents(self.first) != _contents(self.second)
        return self.first.after != self.second.after

    def steps_apart(self) -> tuple[Step | None, Step | None]:
        """Return the first pair of transforms that differ by name or output; ``None`` in place of a missing one."""
        steps = zip_longest(self.first.steps or (), self.second.steps or ())
        form = attrgetter("transform", "after")
        return next((pair for pair in steps if None in pair or form(pair[0]) != form(pair[1])), (None, None))

    def drew(self) -> tuple[str, ...]:
        """Return the generators drawn from in the first transform that differs, else outside the transforms."""
        drew = [step.drew for step in self.steps_apart() if step is not None]
        drew = drew or [self.first.drew_outside, self.second.drew_outside]
        return tuple(dict.fromkeys(name for names in drew for name in names))


def _contents(sample: Sample) -> tuple[str | None, tuple[str, ...] | None]:
    return sample.before, sample.file_digests


def _samples_in_common(first: Observed, second: Observed) -> tuple[_Pair, ...] | None:
    """Pair each sample that both checks recorded, in the order of the first: by its files, else by its index.

    ``None`` where samples cannot be identified.
    """
    samples = [seen.batches.samples for seen in (first, second)]
    by_file = all(samples) and all(sample.files for side in samples for sample in side)
    named, twins = (_by_name(seen, by_file=by_file) for seen in (first, second))
    if not twins:
        return None
    return tuple(_Pair(name, sample, twins[name][0], batch) for name, (sample, batch) in named.items() if name in twins)


def _by_name(seen: Observed, *, by_file: bool) -> dict[str, tuple[Sample, Batch]]:
    """Map a unique name to each sample and its batch; a sample that was drawn twice has a count in its name."""
    named: dict[str, tuple[Sample, Batch]] = {}
    counts: Counter[str] = Counter()
    for batch in seen.batches.batches:
        for sample in batch.samples or ():
            if by_file or sample.index is not None:
                name = " ".join(sample.files or ()) if by_file else f"sample {sample.index}"
                counts[name] += 1
                named[f"{name} ({counts[name]})" if counts[name] > 1 else name] = sample, batch
    return named


# ----------------------------------------------------------------------------------------------- the single stages


def _stages(
    first: Observed, second: Observed, pairs: Sequence[_Pair] | None
) -> tuple[tuple[Stage, ...], Divergence | None]:
    """Return all stages but the environment in order, and the first divergence where both checks have a trace."""
    order = _order(first, second)
    after = _after(first, second, pairs, order=order.status)
    differing = [pair for pair in pairs or () if pair.differs(before=False)]
    if order.status == after.status == DIFFERS and all(pair.drew() for pair in differing):
        after = replace(after, status=FOLLOWS)  # who draws for another sample, or from another worker, draws otherwise
    kernel, divergence = _kernel(first, second)
    if (
        after.status == UNSEEN
        and order.status != DIFFERS
        and divergence is not None
        and divergence.origin == Origin.INPUT
    ):
        after = replace(after, status=DIFFERS, detail=f"{divergence.detail}; as a whole: {after.detail}")
    stages = [_files(first, second), order, _before(first, second, pairs), after, _weights(first, second)]
    last = [_output(first, second), kernel]
    known = any(stage.status == DIFFERS for stage in stages)
    for stage in last:
        stages.append(replace(stage, status=FOLLOWS) if known and stage.status == DIFFERS else stage)
        known = known or stage.status == DIFFERS  # the kernel explains the first output
    return tuple(stages), divergence


def _environment(first: Observed, second: Observed) -> Stage:
    sides: list[dict[str, object]] = []
    for seen in (first, second):
        around = seen.surroundings
        sides.append({"tracer": "python", **around.machine, "settings": dict(around.settings)})
        if around.hash_seed_by == "user":
            sides[-1]["PYTHONHASHSEED"] = around.hash_seed
        sides[-1]["seed of the pipeline"] = str(seen.loader.seed)
    changes = _changes(*sides)
    changes += _order_words("the user's modules", first.surroundings.imports, second.surroundings.imports)
    return _stage("environment", changes)


def _changes(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    changes = environment_changes([first], [second])
    return [f"{change.key} {change.base or 'absent'} / {change.new or 'absent'}" for change in changes]


def _files(first: Observed, second: Observed) -> Stage:
    name = "file list"
    files, other_files = _listed(first), _listed(second)
    if files is None and other_files is None:
        why = first.batches.absent.get("files") or first.loader.absent.get("listing")
        return Stage(name, UNSEEN, why or "neither check saw all files")
    if files is None or other_files is None:
        return Stage(name, DIFFERS, f"only the {_which(files)} check saw the files", one_sided=True)
    sides = (("first", Counter(files) - Counter(other_files)), ("second", Counter(other_files) - Counter(files)))
    return _stage(name, [f"only in the {which}: {a_few(sorted(names), _SHOWN)}" for which, names in sides if names])


def _listed(seen: Observed) -> tuple[str, ...] | None:
    """Return the files of the dataset in its own order.

    These are the files that it lists, else those that were opened if the loader was exhausted; ``None`` where neither
    is known.
    """
    if seen.loader.listing is not None:
        return seen.loader.listing.files
    if not seen.batches.exhausted or seen.batches.files is None:
        return None
    return tuple(file for sample in seen.batches.samples for file in sample.files or ())


def _order(first: Observed, second: Observed) -> Stage:
    words, one_sided = [], []
    lists = first.loader.listing, second.loader.listing
    known = None not in lists
    if lists[0] is not None and lists[1] is not None and sorted(lists[0].files) == sorted(lists[1].files):
        words += _order_words(f"the dataset's list ({lists[0].attribute})", lists[0].files, lists[1].files)
    for what, seen, other_seen in (
        ("indices", first.batches.indices, second.batches.indices),
        ("files in the batches", first.batches.files, second.batches.files),
    ):
        if (seen is None) != (other_seen is None):
            one_sided.append(f"only the {_which(seen)} check saw the {what}")
        elif seen is not None and other_seen is not None:
            known = True
            words += _order_words(what, seen, other_seen)
    if words or one_sided:
        return Stage("order", DIFFERS, "; ".join([*words, *one_sided]), one_sided=not words)
    return Stage("order", EQUAL) if known else _order_of_contents(first, second)


def _order_of_contents(first: Observed, second: Observed) -> Stage:
    """Compare the order of samples, else of batches, by content.

    The same content at another position is another order; other content may be either.
    """
    what = "samples"
    digests, others = ([sample.after for sample in seen.batches.samples] for seen in (first, second))
    if not digests or not others or None in digests or None in others:
        what = "batches"
        digests, others = _whole(first), _whole(second)
    if digests == others and None not in digests:
        return Stage("order", EQUAL, "by content alone: neither indices nor files were seen")
    if None not in digests and Counter(digests) == Counter(others):
        return Stage("order", DIFFERS, f"the same {what} come in another order")
    places, other_places = (
        {digest: place for place, digest in enumerate(side) if digest is not None and side.count(digest) == 1}
        for side in (digests, others)
    )
    for digest, place in places.items():
        if other_places.get(digest, place) != place:
            words = f"of the {what}, the second has at {other_places[digest]} what the first has at {place}"
            return Stage("order", DIFFERS, words)
    return Stage("order", UNSEEN, first.batches.absent.get("index") or "neither indices nor files of samples were seen")


def _whole(seen: Observed) -> list[str | None]:
    return [batch.digest for batch in seen.batches.batches]


def _before(first: Observed, second: Observed, pairs: Sequence[_Pair] | None) -> Stage:
    name = "before transform"
    if not pairs:
        return Stage(name, UNSEEN, _no_pairs(first, second, pairs))
    contents = [(str(pair), _contents_seen(pair.first), _contents_seen(pair.second)) for pair in pairs]
    return _judged(name, contents, "samples", first.batches.absent.get("before", "it was not seen"))


def _contents_seen(sample: Sample) -> object:
    contents = _contents(sample)
    return None if contents == (None, None) else contents


def _after(first: Observed, second: Observed, pairs: Sequence[_Pair] | None, *, order: str) -> Stage:
    """Compare collated samples and whole batches; whole batches only where ``order``, the status of that stage, allows
    it."""
    name = "after transform"
    why = first.batches.absent.get("digest", "it was not seen")
    if pairs and any(sample.after is not None for pair in pairs for sample in (pair.first, pair.second)):
        of_samples = _judged(name, [(str(pair), pair.first.after, pair.second.after) for pair in pairs], "samples", why)
        if of_samples.status == DIFFERS or order != EQUAL:
            return of_samples
    if order == DIFFERS:
        return Stage(name, UNSEEN, _no_pairs(first, second, pairs))
    batches = enumerate(zip_longest(_whole(first), _whole(second), fillvalue="no batch"))
    of_batches = _judged(name, [(f"batch {number}", *pair) for number, pair in batches], "batches", why)
    if of_batches.status == DIFFERS and order == UNSEEN:
        words = f"{of_batches.detail}; whether by their order or by their content was not seen"
        return replace(of_batches, detail=words)
    return of_batches


def _judged(name: str, items: Sequence[tuple[str, object, object]], what: str, why: str) -> Stage:
    """Compare items of (name, first value, second value), where ``None`` means not recorded.

    An item that neither check recorded is not equal: where no item differs, the stage is then unseen, with the reason
    ``why``.
    """
    differing = [item for item, seen, other_seen in items if seen != other_seen]
    if differing:
        return _stage(name, _counted(differing, len(items), f" {what}"))
    unseen = sum(seen is None for _, seen, _ in items)
    if unseen:
        rest = f" ({unseen} of {len(items)} {what}; the others are equal)" if unseen < len(items) else ""
        return Stage(name, UNSEEN, why + rest)
    return Stage(name, EQUAL)


def _weights(first: Observed, second: Observed) -> Stage:
    name = "initial weights"
    weights, other_weights = first.weights.by_name, second.weights.by_name
    if weights is None and other_weights is None:
        return Stage(name, UNSEEN, first.weights.absent.get("parameters", "they were not seen"))
    if weights is None or other_weights is None:
        return Stage(name, DIFFERS, f"only the {_which(weights)} check has a model", one_sided=True)
    return _stage(name, _counted(_names_apart(weights, other_weights), len({**weights, **other_weights})))


def _output(first: Observed, second: Observed) -> Stage:
    name = "first output"
    outputs, other_outputs = first.outputs.predictions, second.outputs.predictions
    layers, other_layers = first.layers, second.layers
    if outputs is None and other_outputs is None and layers is None and other_layers is None:
        return Stage(name, UNSEEN, first.outputs.absent.get("predictions", "it was not seen"))
    for seen, other_seen in ((outputs, other_outputs), (layers, other_layers)):
        if (seen is None) != (other_seen is None):
            return Stage(name, DIFFERS, f"only the {_which(seen)} check saw it", one_sided=True)
    words = []
    if outputs != other_outputs:
        words.append(a_few(_names_apart(outputs or {}, other_outputs or {}), _SHOWN))
    if layers != other_layers:
        words.append(f"first layer that differs: {_first_layer(layers or (), other_layers or ())}")
    return _stage(name, words)


def _first_layer(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> str:
    for a, b in zip(first, second, strict=False):
        if a != b:
            return f"{a[0] or 'the model itself'} ({a[1]})" if a[:2] == b[:2] else f"{a[0]} / {b[0]}"
    return f"{len(first)} rows / {len(second)} rows"


def _kernel(first: Observed, second: Observed) -> tuple[Stage, Divergence | None]:
    name = "kernel"
    if first.trace is None and second.trace is None:
        return Stage(name, UNSEEN, first.outputs.absent.get("predictions", "there is no trace")), None
    if first.trace is None or second.trace is None:
        return Stage(name, DIFFERS, f"only the {_which(first.trace)} check has a trace", one_sided=True), None
    empty = [not trace.records and not trace.results for trace in (first.trace, second.trace)]
    if any(empty):
        return Stage(name, UNSEEN if all(empty) else DIFFERS, "the model ran no op of torch"), None
    tracers = [trace.tracer for trace in (first.trace, second.trace)]
    if tracers[0] != tracers[1]:
        return Stage(name, UNSEEN, f"not compared: the traces are of {' and '.join(tracers)}, and {OTHER_OPS}"), None
    verdict = find_divergence(first.trace, second.trace)
    entered = verdict.divergence
    if entered is not None:
        where = ", ".join(part for part in (entered.origin, entered.phase, entered.module) if part)
        return Stage(name, DIFFERS, f"{entered.kernel or entered.node} ({where}): {entered.detail}"), entered
    if verdict.differing:
        return Stage(name, DIFFERS, f"{a_few(verdict.differing, _SHOWN)} differ"), None
    return _stage(name, ["the losses differ"] if first.outputs.losses != second.outputs.losses else []), None


def _stage(name: str, words: Sequence[str]) -> Stage:
    return Stage(name, DIFFERS, "; ".join(words)) if words else Stage(name, EQUAL)


def _counted(differing: Sequence[str], total: int, what: str = "") -> list[str]:
    return [f"{len(differing)} of {total}{what}: {a_few(differing, _SHOWN)}"] if differing else []


def _no_pairs(first: Observed, second: Observed, pairs: Sequence[_Pair] | None) -> str:
    if pairs is not None:
        return "no sample is in both checks; look at more steps"
    absent = {**second.batches.absent, **first.batches.absent}
    return absent.get("index") or absent.get("samples") or "single samples were not seen"


def _order_words(what: str, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Describe the first position at which two sequences differ; empty where they are equal."""
    items = enumerate(zip_longest(first, second, fillvalue="nothing"))
    return next(([f"{what}: at {number} {a} / {b}"] for number, (a, b) in items if a != b), [])


def _names_apart(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def _which(value: object) -> str:
    return "second" if value is None else "first"


# ------------------------------------------------------------------------------------------------- the evidence


def _evidence(
    stages: Sequence[Stage],
    stage: Stage,
    first: Observed,
    second: Observed,
    pairs: Sequence[_Pair],
    divergence: Divergence | None,
) -> Evidence:
    imports = [seen.surroundings.imports for seen in (first, second)]
    sides = [seen.surroundings.machine.get("packages") for seen in (first, second)]
    evidence = Evidence(
        stage.name,
        one_sided=stage.one_sided,
        imports=imports[0] != imports[1] and sorted(imports[0]) == sorted(imports[1]),
        packages=", ".join(_changes(*(side if isinstance(side, Mapping) else {} for side in sides))),
        asked_otherwise=_asked_otherwise(stage.name, first, second),
    )
    if stage.name == "order":
        return _of_order(evidence, first, second)
    if stage.name in ("before transform", "after transform"):
        return _of_samples(evidence, first, second, pairs, before=stage.name == "before transform")
    if stage.name == "initial weights":
        forms = [
            {name: word.partition(":")[0] for name, word in (seen.weights.by_name or {}).items()}
            for seen in (first, second)
        ]
        draws, drew = _drawn_in((MAKE_MODEL, MAKE_LOADER, IMPORT), first, second)
        return replace(evidence, names_differ=forms[0] != forms[1], draws=draws, drew=drew)
    unseen = tuple(other.name for other in stages if other.name in _OF_MODEL and other.status == UNSEEN)
    evidence = replace(evidence, unseen=unseen)
    if divergence is not None:
        return replace(evidence, origin=divergence.origin, kernel=divergence.kernel or divergence.node)
    return evidence


def _asked_otherwise(stage: str, first: Observed, second: Observed) -> tuple[str, ...]:
    """List the settings of the user that differ: a difference that follows from them needs no other reason."""
    a, b = (
        {name: getattr(seen.loader, name) for name in _SET_BY_USERS.get(stage, ())}
        | ({"generators": sorted(seen.loader.generators) or "none"} if stage == "order" else {})
        for seen in (first, second)
    )
    return tuple(f"{name} {a[name]} / {b[name]}" for name in a if a[name] != b[name])


def _hash_order(stage: str, first: Check, second: Check) -> bool | None:
    """Derive from the checks' own reruns and hash seeds whether the hash seed decides this stage."""
    repetitions = [check.repetition for check in (first, second) if check.repetition is not None]
    for repetition in repetitions:
        if repetition.first == stage and repetition.hash_order is not None:
            return repetition.hash_order
    around = [check.seen.surroundings for check in (first, second)]
    if around[0].hash_seed == around[1].hash_seed:
        return False
    by_us = all(side.hash_seed_by == "hashbench" for side in around)
    return False if by_us and len(repetitions) == 2 and all(item.repeats for item in repetitions) else None


def _of_order(evidence: Evidence, first: Observed, second: Observed) -> Evidence:
    indices = first.batches.indices, second.batches.indices
    lists = first.loader.listing, second.loader.listing
    by_default = first.loader.draws_by_default
    evidence = replace(
        evidence,
        same_indices=None if None in indices else indices[0] == indices[1],
        listing=lists[0] is not None and lists[1] is not None and lists[0].files != lists[1].files,
        folder=_folder(first, second),
        no_generator=by_default if by_default == second.loader.draws_by_default else None,
        given_moved=moved(first.loader.generators, second.loader.generators),
        whole=_whole_made_by(first, second),
    )
    if evidence.same_indices is None:
        evidence = _drawn_by_batches(evidence, first, second)
    spans = (MAKE_LOADER, IMPORT) if evidence.same_indices is not False else (LOADER, MAKE_LOADER, IMPORT)
    draws, drew = _drawn_in(spans, first, second)
    elsewhere = {
        name
        for seen in (first, second)
        for batch in seen.batches.batches[:1]
        if batch.worker is None  # what its samples and collate_fn drew, no sampler did
        for names in (batch.drew, *(sample.drew for sample in batch.samples or ()))
        for name in names
    } - {"torch"}
    draws = tuple(draw.without(elsewhere) if draw.span == LOADER else draw for draw in draws)
    return replace(
        evidence,
        draws=(*evidence.draws, *(draw for draw in draws if draw.generators)),
        drew=tuple(dict.fromkeys((*evidence.drew, *drew))),
        moved=_moved_at(_ASKED, first, second),
    )


def _folder(first: Observed, second: Observed) -> str:
    """Return a folder that has the same names in both checks, listed by the system in another order; else an empty
    string."""
    twins = {folder.path: folder for folder in second.loader.folders}
    for folder in first.loader.folders:
        twin = twins.get(folder.path)
        if twin is not None and folder.as_set == twin.as_set and folder.in_order != twin.in_order:
            return "the folder of the files" if folder.path == "." else folder.path
    return ""


def _drawn_in(spans: Sequence[str], first: Observed, second: Observed) -> tuple[tuple[Draw, ...], tuple[str, ...]]:
    """Return the draws in these of :data:`SPANS` from generators whose states differed before, and all generators drawn
    from."""
    draws: list[Draw] = []
    drew: dict[str, None] = {}
    for span in spans:
        begin, end = SPANS[span]
        names = dict.fromkeys(name for seen in (first, second) for name in seen.random_state.drew(begin, end))
        drew |= names
        apart, apart_after = (_moved_at(moment, first, second) for moment in (begin, end))
        for seeded in (False, True):
            drawn = tuple(name for name in apart if name in names and (name not in apart_after) == seeded)
            draws += [Draw(span, drawn, seeded=seeded)] if drawn else []
    return tuple(draws), tuple(drew)


def _drawn_by_batches(evidence: Evidence, first: Observed, second: Observed, *, last: int | None = None) -> Evidence:
    """Add the generators drawn from while batches were made.

    With ``last``, only batches up to that number, by the process that made it.
    """
    pairs = list(zip(first.batches.batches, second.batches.batches, strict=False))
    if last is not None:
        pairs = [(a, b) for a, b in pairs[: last + 1] if a.worker == pairs[min(last, len(pairs) - 1)][0].worker]
    drew: dict[str, None] = {}
    apart: dict[str, None] = {}
    for a, b in pairs:
        names = dict.fromkeys((*a.drew, *b.drew))
        drew |= names
        apart |= dict.fromkeys(name for name in moved(a.generators or {}, b.generators or {}) if name in names)
    draws = (Draw(evidence.whole, tuple(apart)),) if apart else ()
    return replace(evidence, drew=tuple(drew), moved=tuple(apart), draws=draws)


def _moved_at(moment: str, first: Observed, second: Observed) -> tuple[str, ...]:
    """Return the global generators whose states differ at this moment."""
    return moved(*(seen.random_state.moments.get(moment, {}) for seen in (first, second)))


def _of_samples(
    evidence: Evidence, first: Observed, second: Observed, pairs: Sequence[_Pair], *, before: bool
) -> Evidence:
    pair = next((pair for pair in pairs if pair.differs(before=before)), None)
    if pair is None:
        return _of_batches(evidence, first, second)
    names = [None if step is None or before else step.transform for step in pair.steps_apart()]
    digests = pair.first.file_digests
    evidence = replace(
        evidence,
        transform=names[0] or "",
        other_transforms=names[0] != names[1],
        drew=pair.first.drew_outside if before else pair.drew(),
        moved=moved(pair.first.generators or {}, pair.second.generators or {}),
        same_files=None if digests is None else digests == pair.second.file_digests,
        worker=pair.batch.worker,
    )
    draws, _ = _drawn_in((MAKE_LOADER, IMPORT), first, second)
    return replace(_of_worker(evidence, first, second), draws=draws)


def _of_batches(evidence: Evidence, first: Observed, second: Observed) -> Evidence:
    """Add the evidence on the first whole batch that differs, where no sample in it is known to differ."""
    digests = zip(_whole(first), _whole(second), strict=False)
    last = next((number for number, (a, b) in enumerate(digests) if a != b), len(first.batches.batches) - 1)
    batches = first.batches.batches
    worker = batches[last].worker if batches else None
    evidence = replace(evidence, whole=_whole_made_by(first, second, last), worker=worker)
    evidence = _of_worker(_drawn_by_batches(evidence, first, second, last=last), first, second)
    draws, _ = _drawn_in((MAKE_LOADER, IMPORT), first, second)
    return replace(evidence, draws=(*evidence.draws, *draws))


def _whole_made_by(first: Observed, second: Observed, number: int | None = None) -> str:
    """Name the code that made whole batches: of the batch ``number``, else of all."""
    if any("loader" in seen.loader.absent for seen in (first, second)):
        return LOADER
    samples = [
        sample
        for seen in (first, second)
        for batch in seen.batches.batches
        if number in (None, batch.number)
        for sample in batch.samples or (Sample(),)
    ]
    if all(sample.index is None for sample in samples):
        return "the dataset"
    return "collate_fn" if all(sample.after is not None for sample in samples) else "the dataset or collate_fn"


def _of_worker(evidence: Evidence, first: Observed, second: Observed) -> Evidence:
    """Add the generators whose states differed when the worker began, and those that only ``worker_init_fn`` moved
    apart."""
    workers = [
        [worker for worker in seen.random_state.workers if worker.worker == evidence.worker] for seen in (first, second)
    ]
    if not all(workers):
        return evidence
    (a, *_), (b, *_) = workers
    at_start, initialised = moved(a.began, b.began), moved(a.initialised, b.initialised)
    by_init = tuple(name for name in initialised if name not in at_start)
    return replace(evidence, moved_at_start=at_start, moved_by_init=by_init)


def _missing_seeding(used: Sequence[Evidence], first: Observed, second: Observed) -> Seeding | None:
    """Return the generators that are seeded and those that are not, if a difference was drawn from one of the latter.

    A generator that ``set_seed`` seeds is in another state in the two checks before it, and in the same state after it.
    """
    if first.loader.seed != second.loader.seed:
        return None
    before, after = (_moved_at(moment, first, second) for moment in (_IMPORTED, _SEEDED))
    drawn = {name for evidence in used for draw in evidence.draws for name in draw.generators}
    for evidence in used:
        drawn |= {name for name in evidence.drew if name in evidence.moved}
        if evidence.no_generator:  # a sampler of torch's own
            drawn |= {name for name in evidence.moved if name == "torch"}
        if evidence.moved_at_start and "loader.generator" not in first.loader.generators:
            drawn.add("torch")  # of which a loader draws the seeds of its workers
    unseeded = tuple(name for name in SEEDS if name in after and name in drawn)
    if not unseeded:
        return None
    changed = {name for seen in (first, second) for name in seen.random_state.drew(_IMPORTED, _SEEDED)}
    return Seeding(tuple(name for name in SEEDS if name in before and name not in after and name in changed), unseeded)


# -------------------------------------------------------------------------------------------------------- words


def as_text(verdict: Verdict, *, first: str, second: str) -> str:
    """Format the stages, the missing seeding, then the reasons and fixes of each finding, the first first.

    Names come from files, so terminal control characters are replaced.
    """
    return "\n".join(map(one_line, _lines(verdict, first, second)))


def _lines(verdict: Verdict, first: str, second: str) -> Iterator[str]:
    width = max(map(len, STAGES)) + 2
    for stage in verdict.stages:
        yield f"{stage.name:<{width}}{stage.status:<9}{stage.detail}".rstrip()
    yield ""
    if verdict.repeats:
        unseen = ", ".join(stage.name for stage in verdict.stages if stage.status == UNSEEN)
        yield f"{first} and {second} agree{f', as far as was seen (not: {unseen})' if unseen else ''}."
        return
    if verdict.seeding is not None:
        yield f"{verdict.seeding.sentence}. Add to set_seed:"
        yield from (f"      {line}" for line in verdict.seeding.fix.splitlines())
        yield ""
    yield f"The first stage that differs between {first} and {second}: {verdict.first}"
    for finding in verdict.findings:
        if finding.stage.name != verdict.first:
            yield ""
            yield f"Also, by itself: {finding.stage.name}"
        for reason in finding.reasons:
            yield f"  {reason.confidence}: {reason.name}, for {reason.because}"
            yield "  fix:"
            yield from (f"      {line}" for line in reason.fix.splitlines())


def as_json(verdict: Verdict) -> str:
    """Format the verdict as one JSON document."""
    content = {
        "repeats": verdict.repeats,
        "first": verdict.first,
        "stages": to_json(verdict.stages),
        "findings": [
            {
                "stage": finding.stage.name,
                "reasons": [{**to_json(reason), "fix": reason.fix} for reason in finding.reasons],
            }
            for finding in verdict.findings
        ],
        "seeding": None if verdict.seeding is None else {**to_json(verdict.seeding), "fix": verdict.seeding.fix},
        "divergence": to_json(verdict.divergence),
    }
    return json.dumps(content, indent=1)
