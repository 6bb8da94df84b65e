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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

from hashbench.core.catalog import Origin
from hashbench.core.divergence import find as find_divergence
from hashbench.core.errors import HashbenchError
from hashbench.core.io import to_json
from hashbench.core.records import Divergence
from hashbench.core.report.compare import environment_changes
from hashbench.core.text import join_limited, one_line
from hashbench.core.trace.file import OTHER_OPS
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
    TransformStep,
    moved,
)
from hashbench.tools.pipeline.reasons import (
    SEEDS,
    ModelFacts,
    OrderFacts,
    RandomDraw,
    Reason,
    SampleFacts,
    Seeding,
    StageEvidence,
    decide,
)

EQUAL, DIFFERS, UNSEEN, FOLLOWS = "equal", "differs", "unseen", "follows"

_ASKED = SPANS[LOADER][0]
_IMPORTED, _SEEDED = MOMENTS[1:3]
_FIRST_MADE = MOMENTS[-1]
_States = tuple[Mapping[str, str], Mapping[str, str]]
_SHOWN = 3
_Value = TypeVar("_Value")


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
class PipelineVerdict:
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


def compare(first: Check, second: Check, *, hash_order: Mapping[str, bool | None] | None = None) -> PipelineVerdict:
    """Compare two checks of the same pipeline.

    Args:
        first, second: as returned by :func:`observed.read`.
        hash_order: for each stage whether its difference disappears with an equal hash seed, where the caller tested
            that.

    Raises:
        HashbenchError: they recorded different numbers of batches, or neither recorded anything that can be compared.
    """
    both = Both(first.seen, second.seen)
    steps = both.of(lambda seen: seen.batches.asked_for)
    if steps[0] != steps[1]:
        raise HashbenchError(
            f"the checks are of {steps[0]} and {steps[1]} steps",
            consequence="nothing was compared",
            tip="Make both with the same `steps`.",
        )
    stages: dict[str, Stage] = {}
    for name, kind in _KINDS.items():
        stage = replace(kind.compare(both, stages), name=name)
        follows = kind.follows and any(earlier.status == DIFFERS for earlier in stages.values())
        stages[name] = replace(stage, status=FOLLOWS) if follows and stage.status == DIFFERS else stage
    if all(stage.status == UNSEEN for stage in stages.values()):
        raise HashbenchError(
            f"neither {first.name} nor {second.name} saw anything that can be compared",
            consequence="that is not the same as equal",
            tip="Let the loader yield tensors, arrays, images or plain values.",
        )
    used = {name: _evidence(both, stages, stage) for name, stage in stages.items() if stage.status == DIFFERS}
    for name, evidence in list(used.items()):
        tried = _hash_order(name, first, second) if hash_order is None else hash_order.get(name)
        if tried and next(iter(used.values())).hash_order and not evidence.hash_calls:  # labels in the order of a set
            stages[name] = replace(stages[name], status=FOLLOWS)
            del used[name]
        else:
            used[name] = replace(evidence, hash_order=tried)
    findings = [Finding(stages[name], decide(evidence)) for name, evidence in used.items()]
    all_stages = (replace(_environment(both), name="environment"), *stages.values())
    return PipelineVerdict(
        all_stages, tuple(findings), next(iter(used), ""), both.traces[1], _missing_seeding(used, both)
    )


# ------------------------------------------------------------------------------------------------------ samples


@dataclass(frozen=True)
class Both:
    """Two records side by side, and what is derived from both."""

    first: Observed
    second: Observed

    def of(self, get: Callable[[Observed], _Value]) -> tuple[_Value, _Value]:
        """Return ``get`` of each."""
        return get(self.first), get(self.second)

    @cached_property
    def samples(self) -> tuple[_SamplePair, ...] | None:
        """Each sample that both recorded, in the order of the first, matched by its files, else by its index; ``None``
        where samples cannot be identified."""
        by_file = all(self.of(lambda seen: bool(seen.batches.samples) and all(s.files for s in seen.batches.samples)))
        named, twins = self.of(lambda seen: _by_name(seen, by_file=by_file))
        if not twins:
            return None
        return tuple(
            _SamplePair(name, one, twins[name][0], batch, twins[name][1])
            for name, (one, batch) in named.items()
            if name in twins
        )

    @cached_property
    def traces(self) -> tuple[Stage, Divergence | None]:
        """The comparison of the traces, and their first divergence."""
        return _compare_traces(self)


@dataclass(frozen=True, slots=True)
class _SamplePair:
    """The same sample in two checks, and its batch in each."""

    name: str
    first: Sample
    second: Sample
    batch: Batch
    other_batch: Batch

    def __str__(self) -> str:
        worker = "" if self.batch.worker is None else f", worker {self.batch.worker}"
        return f"{self.name} (batch {self.batch.number}{worker})"

    def differs(self, *, before: bool) -> bool:
        """Return True if the input of the first transform differs (``before``), else if the collated sample does."""
        if before:
            return _contents(self.first) != _contents(self.second)
        return self.first.after != self.second.after

    def is_moved(self) -> bool:
        """Return True if the dataset was asked for the same file by another index."""
        elsewhere = bool(self.first.files) and self.first.index != self.second.index
        return elsewhere and not self.differs(before=True) and self.steps_apart() == (None, None)

    def steps_apart(self) -> tuple[TransformStep | None, TransformStep | None]:
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

Known = Mapping[str, "Stage"]
"""The stages so far, by name."""


def _environment(both: Both) -> Stage:
    def facts(seen: Observed) -> dict[str, object]:
        around = seen.surroundings
        by_user = {"PYTHONHASHSEED": around.hash_seed} if around.hash_seed_by == "user" else {}
        machine = {"tracer": "python", **around.machine, "settings": dict(around.settings)}
        return machine | by_user | {"seed of the pipeline": str(seen.loader.seed)}

    imports = both.of(lambda seen: seen.surroundings.imports)
    return _stage([*_changes(*both.of(facts)), *_order_words("the user's modules", *imports)])


def _changes(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    changes = environment_changes([first], [second])
    return [f"{change.key} {change.base or 'absent'} / {change.new or 'absent'}" for change in changes]


def _files(both: Both, _known: Known) -> Stage:
    files, others = both.of(_listed)
    if files is None or others is None:
        why = both.first.batches.absent.get("files") or both.first.loader.absent.get("listing")
        return _half_seen(files, others, "check saw the files", why or "neither check saw all files")
    sides = (("first", Counter(files) - Counter(others)), ("second", Counter(others) - Counter(files)))
    return _stage([f"only in the {which}: {join_limited(sorted(names), _SHOWN)}" for which, names in sides if names])


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


def _order(both: Both, _known: Known) -> Stage:
    words, one_sided = [], []
    first, second = both.of(lambda seen: seen.loader.listing)
    known = first is not None and second is not None
    if first is not None and second is not None and sorted(first.files) == sorted(second.files):
        words += _order_words(f"the dataset's list ({first.attribute})", first.files, second.files)
    for what, (seen, other_seen) in (
        ("indices", both.of(lambda seen: seen.batches.indices)),
        ("files in the batches", both.of(lambda seen: seen.batches.files)),
    ):
        if seen is not None and other_seen is not None:
            known = True
            words += _order_words(what, seen, other_seen)
        elif seen is not None or other_seen is not None:
            one_sided.append(_half_seen(seen, other_seen, f"check saw the {what}").detail)
    if words or one_sided:
        return Stage("", DIFFERS, "; ".join([*words, *one_sided]), one_sided=not words)
    return _stage([]) if known else _order_of_contents(both)


def _order_of_contents(both: Both) -> Stage:
    """Compare the order of samples, else of batches, by content.

    The same content at another position is another order; other content may be either.
    """
    what = "samples"
    digests, others = both.of(lambda seen: [sample.after for sample in seen.batches.samples])
    if not digests or not others or None in digests or None in others:
        what = "batches"
        digests, others = both.of(_whole)
    if digests == others and None not in digests:
        return Stage("", EQUAL, "by content alone: neither indices nor files were seen")
    if None not in digests and Counter(digests) == Counter(others):
        return _stage([f"the same {what} come in another order"])
    places, other_places = (
        {digest: place for place, digest in enumerate(side) if digest is not None and side.count(digest) == 1}
        for side in (digests, others)
    )
    for digest, place in places.items():
        if other_places.get(digest, place) != place:
            return _stage([f"of the {what}, the second has at {other_places[digest]} what the first has at {place}"])
    why = both.first.batches.absent.get("index") or "neither indices nor files of samples were seen"
    return Stage("", UNSEEN, why)


def _whole(seen: Observed) -> list[str | None]:
    return [batch.digest for batch in seen.batches.batches]


def _before(both: Both, _known: Known) -> Stage:
    if not both.samples:
        return _no_pairs(both)
    contents = [(str(pair), _contents_seen(pair.first), _contents_seen(pair.second)) for pair in both.samples]
    return _judged(contents, "samples", both.first.batches.absent.get("before", "it was not seen"))


def _contents_seen(sample: Sample) -> object:
    contents = _contents(sample)
    return None if contents == (None, None) else contents


def _after(both: Both, known: Known) -> Stage:
    """Compare collated samples and whole batches; a random transform differs as a consequence of another order, and
    what the trace saw of the inputs stands in for batches that cannot be hashed."""
    order, stage = known["order"].status, _after_as_collated(both, known["order"].status)
    divergence = both.traces[1]
    if order == stage.status == DIFFERS:
        differing = (pair for pair in both.samples or () if pair.differs(before=False))
        # who draws for another sample, or from another worker, draws otherwise; a label may be made of the index
        return replace(stage, status=FOLLOWS) if all(pair.drew() or pair.is_moved() for pair in differing) else stage
    if stage.status == UNSEEN and order != DIFFERS and divergence is not None and divergence.origin == Origin.INPUT:
        return _stage([divergence.detail, f"as a whole: {stage.detail}"])
    return stage


def _after_as_collated(both: Both, order: str) -> Stage:
    """Compare collated samples, and whole batches only where ``order``, the status of that stage, allows it."""
    why = both.first.batches.absent.get("digest", "it was not seen")
    samples = [(str(pair), pair.first.after, pair.second.after) for pair in both.samples or ()]
    if any(digest is not None for _, *digests in samples for digest in digests):
        of_samples = _judged(samples, "samples", why)
        if of_samples.status == DIFFERS or order != EQUAL:
            return of_samples
    if order == DIFFERS:
        return _no_pairs(both)
    batches = enumerate(zip_longest(*both.of(_whole), fillvalue="no batch"))
    of_batches = _judged([(f"batch {number}", *pair) for number, pair in batches], "batches", why)
    if of_batches.status == DIFFERS and order == UNSEEN:
        return _stage([of_batches.detail, "whether by their order or by their content was not seen"])
    return of_batches


def _judged(items: Sequence[tuple[str, object, object]], what: str, why: str) -> Stage:
    """Compare items of (name, first value, second value), where ``None`` means not recorded.

    An item that neither check recorded is not equal: where no item differs, the stage is then unseen, with the reason
    ``why``.
    """
    differing = [item for item, seen, other_seen in items if seen != other_seen]
    unseen = sum(seen is None for _, seen, _ in items)
    if differing or not unseen:
        return _stage(_counted(differing, len(items), f" {what}"))
    rest = f" ({unseen} of {len(items)} {what}; the others are equal)" if unseen < len(items) else ""
    return Stage("", UNSEEN, why + rest)


def _weights(both: Both, _known: Known) -> Stage:
    first, second = both.of(lambda seen: seen.weights.by_name)
    if first is None or second is None:
        why = both.first.weights.absent.get("parameters", "they were not seen")
        return _half_seen(first, second, "check has a model", why)
    return _stage(_counted(_names_apart(first, second), len({**first, **second})))


def _output(both: Both, _known: Known) -> Stage:
    outputs, layers = both.of(lambda seen: seen.outputs.predictions), both.of(lambda seen: seen.layers)
    if outputs == layers == (None, None):
        return Stage("", UNSEEN, both.first.outputs.absent.get("predictions", "it was not seen"))
    for seen, other_seen in (outputs, layers):
        if (seen is None) != (other_seen is None):
            return _half_seen(seen, other_seen, "check saw it")
    words = []
    if outputs[0] != outputs[1]:
        words.append(join_limited(_names_apart(outputs[0] or {}, outputs[1] or {}), _SHOWN))
    if layers[0] != layers[1]:
        words.append(f"first layer that differs: {_first_layer(layers[0] or (), layers[1] or ())}")
    return _stage(words)


def _first_layer(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> str:
    for a, b in zip(first, second, strict=False):
        if a != b:
            return f"{a[0] or 'the model itself'} ({a[1]})" if a[:2] == b[:2] else f"{a[0]} / {b[0]}"
    return f"{len(first)} rows / {len(second)} rows"


def _compare_traces(both: Both) -> tuple[Stage, Divergence | None]:
    first, second = both.of(lambda seen: seen.trace)
    if first is None or second is None:
        why = both.first.outputs.absent.get("predictions", "there is no trace")
        return _half_seen(first, second, "check has a trace", why), None
    empty = [not trace.records and not trace.results for trace in (first, second)]
    if any(empty):
        return Stage("", UNSEEN if all(empty) else DIFFERS, "the model ran no op of torch"), None
    if first.tracer != second.tracer:
        why = f"not compared: the traces are of {first.tracer} and {second.tracer}, and {OTHER_OPS}"
        return Stage("", UNSEEN, why), None
    verdict = find_divergence(first, second)
    entered = verdict.divergence
    if entered is not None:
        where = ", ".join(part for part in (entered.origin, entered.phase, entered.module) if part)
        return _stage([f"{entered.kernel or entered.node} ({where}): {entered.detail}"]), entered
    if verdict.differing:
        return _stage([f"{join_limited(verdict.differing, _SHOWN)} differ"]), None
    losses = both.of(lambda seen: seen.outputs.losses)
    return _stage(["the losses differ"] if losses[0] != losses[1] else []), None


def _stage(words: Sequence[str]) -> Stage:
    return Stage("", DIFFERS, "; ".join(words)) if words else Stage("", EQUAL)


def _half_seen(first: object, second: object, what: str, why: str = "") -> Stage:
    """Return the stage where a check did not record it: its value is ``None``."""
    if first is None and second is None:
        return Stage("", UNSEEN, why)
    return Stage("", DIFFERS, f"only the {'second' if first is None else 'first'} {what}", one_sided=True)


def _counted(differing: Sequence[str], total: int, what: str = "") -> list[str]:
    return [f"{len(differing)} of {total}{what}: {join_limited(differing, _SHOWN)}"] if differing else []


def _no_pairs(both: Both) -> Stage:
    if both.samples is not None:
        return Stage("", UNSEEN, "no sample is in both checks; look at more steps")
    absent = {**both.second.batches.absent, **both.first.batches.absent}
    return Stage("", UNSEEN, absent.get("index") or absent.get("samples") or "single samples were not seen")


def _order_words(what: str, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Describe the first position at which two sequences differ; empty where they are equal."""
    items = enumerate(zip_longest(first, second, fillvalue="nothing"))
    return next(([f"{what}: at {number} {a} / {b}"] for number, (a, b) in items if a != b), [])


def _names_apart(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


# ------------------------------------------------------------------------------------------------- the evidence


def _evidence(both: Both, stages: Known, stage: Stage) -> StageEvidence:
    kind = _KINDS[stage.name]
    imports = both.of(lambda seen: seen.surroundings.imports)
    packages = both.of(lambda seen: seen.surroundings.machine.get("packages"))
    evidence = StageEvidence(
        stage.name,
        one_sided=stage.one_sided,
        imports=imports[0] != imports[1] and sorted(imports[0]) == sorted(imports[1]),
        packages=", ".join(_changes(*(side if isinstance(side, Mapping) else {} for side in packages))),
        asked_otherwise=_asked_otherwise(kind, both),
        hash_calls=tuple(dict.fromkeys(line for lines in both.of(_hash_calls) for line in lines)),
    )
    return kind.facts(both, evidence, stages)


def _hash_calls(seen: Observed) -> tuple[str, ...]:
    return seen.surroundings.hash_calls


def _asked_otherwise(kind: _StageKind, both: Both) -> tuple[str, ...]:
    """List the settings of the user that differ: a difference that follows from them needs no other reason."""

    def setting(seen: Observed, name: str) -> object:
        return sorted(seen.loader.generators) or "none" if name == "generators" else getattr(seen.loader, name)

    values = [(name, setting(both.first, name), setting(both.second, name)) for name in kind.settings]
    return tuple(f"{name} {a} / {b}" for name, a, b in values if a != b)


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


def _facts_of_order(both: Both, evidence: StageEvidence, _stages: Known) -> StageEvidence:
    indices = both.of(lambda seen: seen.batches.indices)
    first, second = both.of(lambda seen: seen.loader.listing)
    by_default = both.of(lambda seen: seen.loader.draws_by_default)
    order = OrderFacts(
        same_indices=None if None in indices else indices[0] == indices[1],
        listing=first is not None and second is not None and first.files != second.files,
        folder=_folder(both),
        no_generator=by_default[0] if by_default[0] == by_default[1] else None,
        given_moved=moved(*both.of(lambda seen: seen.loader.generators)),
    )
    evidence = replace(evidence, order=order, whole=_whole_made_by(both))
    evidence = replace(evidence, parted=_parted_in(both, MAKE_LOADER, IMPORT))
    if order.same_indices is None:
        evidence = _drawn_by_batches(both, evidence)
    spans = (MAKE_LOADER, IMPORT) if order.same_indices is not False else (LOADER, MAKE_LOADER, IMPORT)
    draws, drew = _drawn_in(both, *spans)
    elsewhere = {
        name
        for seen in (both.first, both.second)
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
        moved=_moved_at(_ASKED, both),
    )


def _folder(both: Both) -> str:
    """Return a folder that has the same names in both checks, listed by the system in another order; else an empty
    string."""
    twins = {folder.path: folder for folder in both.second.loader.folders}
    for folder in both.first.loader.folders:
        twin = twins.get(folder.path)
        if twin is not None and folder.as_set == twin.as_set and folder.in_order != twin.in_order:
            return "the folder of the files" if folder.path == "." else folder.path
    return ""


def _drawn_in(both: Both, *spans: str) -> tuple[tuple[RandomDraw, ...], tuple[str, ...]]:
    """Return the draws in these of :data:`SPANS` from generators whose states differed before, and all generators drawn
    from."""
    draws: list[RandomDraw] = []
    drew: dict[str, None] = {}
    for span in spans:
        begin, end = SPANS[span]
        names = _drew_between(begin, end, both)
        drew |= names
        apart, apart_after = _moved_at(begin, both), _moved_at(end, both)
        for seeded in (False, True):
            drawn = tuple(name for name in apart if name in names and (name not in apart_after) == seeded)
            draws += [RandomDraw(span, drawn, seeded=seeded)] if drawn else []
    return tuple(draws), tuple(drew)


def _parted_in(both: Both, *spans: str) -> tuple[RandomDraw, ...]:
    """Return of each span the generators that were in the same state before it, and not after it."""
    parted = [(span, _moved_at(SPANS[span][0], both), _moved_at(SPANS[span][1], both)) for span in spans]
    names = [(span, tuple(name for name in after if name not in before)) for span, before, after in parted]
    return tuple(RandomDraw(span, generators) for span, generators in names if generators)


def _parted_between(what: str, before: _States, after: _States) -> tuple[RandomDraw, ...]:
    """Return the generators whose states of the two checks were the same before some code, and not after it."""
    equal = {name for name, state in before[0].items() if before[1].get(name) == state}
    names = tuple(name for name in moved(*after) if name in equal)
    return (RandomDraw(what, names),) if names else ()


def _drew_between(begin: str, end: str, both: Both) -> dict[str, None]:
    names, others = both.of(lambda seen: seen.random_state.drew(begin, end))
    return dict.fromkeys((*names, *others))


def _moved_at(moment: str, both: Both) -> tuple[str, ...]:
    """Return the global generators whose states differ at this moment."""
    return moved(*both.of(lambda seen: seen.random_state.moments.get(moment, {})))


def _drawn_by_batches(both: Both, evidence: StageEvidence, *, last: int | None = None) -> StageEvidence:
    """Add the generators drawn from while batches were made.

    With ``last``, only batches up to that number, by the process that made it.
    """
    pairs = list(zip(both.first.batches.batches, both.second.batches.batches, strict=False))
    if last is not None:
        pairs = [(a, b) for a, b in pairs[: last + 1] if a.worker == pairs[min(last, len(pairs) - 1)][0].worker]
    drew: dict[str, None] = {}
    apart: dict[str, None] = {}
    parted: list[RandomDraw] = []
    for a, b in pairs:
        before, after = (a.generators or {}, b.generators or {}), _after_batch(both, a, b)
        parted += _parted_between(f"{evidence.whole}, in batch {a.number},", before, after)
        names = dict.fromkeys((*a.drew, *b.drew))
        drew |= names
        apart |= dict.fromkeys(name for name in moved(a.generators or {}, b.generators or {}) if name in names)
    draws = (RandomDraw(evidence.whole, tuple(apart)),) if apart else ()
    parted_first = (*evidence.parted, *parted[:1])
    return replace(evidence, drew=tuple(drew), moved=tuple(apart), draws=draws, parted=parted_first)


def _after_batch(both: Both, first: Batch, second: Batch) -> _States:
    """Return the states of the generators behind a batch: before the next one of its process, else, of the first batch
    that the main process makes, at the moment behind it."""
    found: list[Mapping[str, str]] = []
    for seen, batch in ((both.first, first), (both.second, second)):
        later = [one for one in seen.batches.batches[batch.number + 1 :] if one.worker == batch.worker]
        behind = seen.random_state.moments.get(_FIRST_MADE, {}) if batch.number == 0 and batch.worker is None else {}
        found.append((later[0].generators or {}) if later else behind)
    return found[0], found[1]


def _after_sample(batch: Batch, sample: Sample) -> Mapping[str, str]:
    """Return the states of the generators behind a sample: before the next one, or before the batch was collated."""
    samples = batch.samples or ()
    place = next((number for number, one in enumerate(samples) if one is sample), len(samples))
    return (samples[place + 1].generators if place + 1 < len(samples) else batch.generators) or {}


def _facts_of_samples(both: Both, evidence: StageEvidence, _stages: Known) -> StageEvidence:
    """Add the facts on the first sample that differs, else on the first whole batch."""
    before = evidence.stage == "before transform"
    pair = next((pair for pair in both.samples or () if pair.differs(before=before)), None)
    if pair is None:
        batches = both.first.batches.batches
        pairs = enumerate(zip(*both.of(_whole), strict=False))
        last = next((number for number, (a, b) in pairs if a != b), len(batches) - 1)
        sample = _facts_of_worker(both, batches[last].worker if batches else None)
        evidence = _drawn_by_batches(both, replace(evidence, whole=_whole_made_by(both, last)), last=last)
    else:
        names = [None if step is None or before else step.transform for step in pair.steps_apart()]
        digests = pair.first.file_digests
        sample = replace(
            _facts_of_worker(both, pair.batch.worker),
            transform=names[0] or "",
            other_transforms=names[0] != names[1],
            same_files=None if digests is None else digests == pair.second.file_digests,
        )
        drew = pair.first.drew_outside if before else pair.drew()
        states = pair.first.generators or {}, pair.second.generators or {}
        behind = _after_sample(pair.batch, pair.first), _after_sample(pair.other_batch, pair.second)
        parted = _parted_between(f"{sample.transform or 'the dataset'}, for {pair.name},", states, behind)
        evidence = replace(evidence, drew=drew, moved=moved(*states), parted=parted)
    draws = (*evidence.draws, *_drawn_in(both, MAKE_LOADER, IMPORT)[0])
    parted = (*evidence.parted, *_parted_in(both, MAKE_LOADER, IMPORT))
    return replace(evidence, sample=sample, draws=draws, parted=parted)


def _whole_made_by(both: Both, number: int | None = None) -> str:
    """Name the code that made whole batches: of the batch ``number``, else of all."""
    if any(both.of(lambda seen: "loader" in seen.loader.absent)):
        return LOADER
    samples = [
        sample
        for seen in (both.first, both.second)
        for batch in seen.batches.batches
        if number in (None, batch.number)
        for sample in batch.samples or (Sample(),)
    ]
    if all(sample.index is None for sample in samples):
        return "the dataset"
    return "collate_fn" if all(sample.after is not None for sample in samples) else "the dataset or collate_fn"


def _facts_of_worker(both: Both, number: int | None) -> SampleFacts:
    """Return the generators whose states differed when the worker began, and those that only ``worker_init_fn`` moved
    apart."""
    workers = both.of(lambda seen: [worker for worker in seen.random_state.workers if worker.worker == number])
    if not all(workers):
        return SampleFacts(worker=number)
    (a, *_), (b, *_) = workers
    at_start, initialised = moved(a.began, b.began), moved(a.initialised, b.initialised)
    by_init = tuple(name for name in initialised if name not in at_start)
    return SampleFacts(worker=number, moved_at_start=at_start, moved_by_init=by_init)


def _facts_of_weights(both: Both, evidence: StageEvidence, _stages: Known) -> StageEvidence:
    forms = both.of(lambda seen: {name: word.partition(":")[0] for name, word in (seen.weights.by_name or {}).items()})
    draws, drew = _drawn_in(both, MAKE_MODEL, MAKE_LOADER, IMPORT)
    parted = _parted_in(both, MAKE_MODEL, MAKE_LOADER, IMPORT)
    model = ModelFacts(names_differ=forms[0] != forms[1])
    return replace(evidence, model=model, draws=draws, drew=drew, parted=parted)


def _facts_of_model(both: Both, evidence: StageEvidence, stages: Known) -> StageEvidence:
    entered = both.traces[1]
    unseen = tuple(name for name in ("after transform", "initial weights") if stages[name].status == UNSEEN)
    origin, kernel = ("", "") if entered is None else (entered.origin, entered.kernel or entered.node)
    return replace(evidence, model=ModelFacts(unseen=unseen, origin=origin, kernel=kernel))


def _missing_seeding(used: Mapping[str, StageEvidence], both: Both) -> Seeding | None:
    """Return the generators that are seeded and those that are not, if a difference was drawn from one of the latter.

    A generator that ``set_seed`` seeds is in another state in the two checks before it, and in the same state after it.
    """
    if both.first.loader.seed != both.second.loader.seed:
        return None
    before, after = _moved_at(_IMPORTED, both), _moved_at(_SEEDED, both)
    drawn: set[str] = set()
    for evidence in used.values():
        if evidence.hash_order:  # seeded, with hash()
            continue
        drawn.update(name for draw in evidence.draws for name in draw.generators)
        drawn.update(name for name in evidence.drew if name in evidence.moved)
        if evidence.order.no_generator and "torch" in evidence.moved:  # a sampler of torch's own
            drawn.add("torch")
        if evidence.sample.moved_at_start and "loader.generator" not in both.first.loader.generators:
            drawn.add("torch")  # of which a loader draws the seeds of its workers
    unseeded = tuple(name for name in SEEDS if name in after and name in drawn)
    if not unseeded:
        return None
    changed = _drew_between(_IMPORTED, _SEEDED, both)
    return Seeding(tuple(name for name in SEEDS if name in before and name not in after and name in changed), unseeded)


# ------------------------------------------------------------------------------------------------- the stages


def _no_more_facts(_both: Both, evidence: StageEvidence, _stages: Known) -> StageEvidence:
    return evidence


@dataclass(frozen=True, slots=True)
class _StageKind:
    """How one stage is compared; the reasons are found by :func:`~hashbench.tools.pipeline.reasons.decide`.

    Attributes:
        compare: from the two records and the stages before it, to its verdict.
        facts: adds to the evidence what is known of this stage.
        settings: fields of :class:`Loader` by which the user decides the stage.
        follows: a difference is a consequence where any earlier stage differs.
    """

    compare: Callable[[Both, Known], Stage]
    facts: Callable[[Both, StageEvidence, Known], StageEvidence] = _no_more_facts
    settings: tuple[str, ...] = ()
    follows: bool = False


_ORDER_SETTINGS = ("seed", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generators")
_SAMPLE_SETTINGS = ("seed", "num_workers", "worker_init_fn")
_KINDS: Mapping[str, _StageKind] = MappingProxyType(
    {
        "file list": _StageKind(_files),
        "order": _StageKind(_order, _facts_of_order, _ORDER_SETTINGS),
        "before transform": _StageKind(_before, _facts_of_samples, _SAMPLE_SETTINGS),
        "after transform": _StageKind(_after, _facts_of_samples, _SAMPLE_SETTINGS),
        "initial weights": _StageKind(_weights, _facts_of_weights, ("seed",)),
        "first output": _StageKind(_output, _facts_of_model, follows=True),
        "kernel": _StageKind(lambda both, _known: both.traces[0], _facts_of_model, follows=True),
    }
)
STAGES = ("environment", *_KINDS)


# -------------------------------------------------------------------------------------------------------- words


def as_text(verdict: PipelineVerdict, *, first: str, second: str) -> str:
    """Format the stages, the missing seeding, then the reasons and fixes of each finding, the first first.

    Names come from files, so terminal control characters are replaced.
    """
    return "\n".join(map(one_line, _lines(verdict, first, second)))


def _lines(verdict: PipelineVerdict, first: str, second: str) -> Iterator[str]:
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


def as_json(verdict: PipelineVerdict) -> str:
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
