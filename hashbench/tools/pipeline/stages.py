"""Compare two records stage by stage. Imports no torch.

::

    order             differs  indices: at 0 0 / 3; files in the batches: at 0 dark_00.png / light_03.png
    before transform  equal

``file list`` compares the files that the dataset lists, else those that were opened. ``order`` compares the dataset's
own list, the indices that the sampler asked for and the files in the batches, else the positions of equal samples or
batches. ``before transform`` compares samples of the same file (else of the same index) as the first transform received
them. ``after transform`` compares the same samples as they were collated, and whole batches unless their order differs.
A value that only one check recorded differs: absent is never equal. A value that neither recorded is ``unseen``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType

from hashbench.core.catalog import Origin
from hashbench.core.report.compare import environment_changes
from hashbench.core.text import join_limited
from hashbench.core.trace.file import OTHER_OPS
from hashbench.tools.pipeline.observed import Observed
from hashbench.tools.pipeline.pairs import CheckPair

EQUAL, DIFFERS, UNSEEN, FOLLOWS = "equal", "differs", "unseen", "follows"
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class StageVerdict:
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


Known = Mapping[str, StageVerdict]
"""The stages so far, by name."""


def compare_stages(pair: CheckPair) -> dict[str, StageVerdict]:
    """Return the verdict on each stage, the environment first."""
    stages: dict[str, StageVerdict] = {}
    for name, judge in _JUDGES.items():
        stage = replace(judge(pair, stages), name=name)
        follows = name in _OF_MODEL and any(stages[earlier].status == DIFFERS for earlier in [*stages][1:])
        stages[name] = replace(stage, status=FOLLOWS) if follows and stage.status == DIFFERS else stage
    return stages


def changes(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Describe the facts of two environments that differ."""
    found = environment_changes([first], [second])
    return [f"{change.key} {change.base or 'absent'} / {change.new or 'absent'}" for change in found]


# ------------------------------------------------------------------------------------------- the single stages


def _environment(pair: CheckPair, _known: Known) -> StageVerdict:
    def facts(seen: Observed) -> dict[str, object]:
        around = seen.surroundings
        by_user = {"PYTHONHASHSEED": around.hash_seed} if around.hash_seed_by == "user" else {}
        machine = {"tracer": "python", **around.machine, "settings": dict(around.settings)}
        return machine | by_user | {"seed of the pipeline": str(seen.loader.seed)}

    imports = pair.of(lambda seen: seen.surroundings.imports)
    return _stage([*changes(*pair.of(facts)), *_first_place("the user's modules", *imports)])


def _files(pair: CheckPair, _known: Known) -> StageVerdict:
    files, others = pair.of(_listed)
    if files is None or others is None:
        why = pair.first.batches.absent.get("files") or pair.first.loader.absent.get("listing")
        return _half_seen(files, others, "check saw the files", why or "neither check saw all files")
    sides = (("first", Counter(files) - Counter(others)), ("second", Counter(others) - Counter(files)))
    return _stage(f"only in the {which}: {join_limited(sorted(names), _SHOWN)}" for which, names in sides if names)


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


def _order(pair: CheckPair, _known: Known) -> StageVerdict:
    words, one_sided = [], []
    first, second = pair.of(lambda seen: seen.loader.listing)
    known = first is not None and second is not None
    if first is not None and second is not None and sorted(first.files) == sorted(second.files):
        words += _first_place(f"the dataset's list ({first.attribute})", first.files, second.files)
    for what, (seen, other_seen) in (
        ("indices", pair.of(lambda seen: seen.batches.indices)),
        ("files in the batches", pair.of(lambda seen: seen.batches.files)),
    ):
        if seen is not None and other_seen is not None:
            known = True
            words += _first_place(what, seen, other_seen)
        elif seen is not None or other_seen is not None:
            one_sided.append(_half_seen(seen, other_seen, f"check saw the {what}").detail)
    if words or one_sided:
        return StageVerdict("", DIFFERS, "; ".join([*words, *one_sided]), one_sided=not words)
    return _stage() if known else _order_of_contents(pair)


def _order_of_contents(pair: CheckPair) -> StageVerdict:
    """Compare the order of samples, else of batches, by content.

    The same content at another position is another order; other content may be either.
    """
    what = "samples"
    digests, others = pair.of(lambda seen: [sample.after for sample in seen.batches.samples])
    if not digests or not others or None in digests or None in others:
        what = "batches"
        digests, others = pair.of(batch_digests)
    if digests == others and None not in digests:
        return StageVerdict("", EQUAL, "by content alone: neither indices nor files were seen")
    if None not in digests and Counter(digests) == Counter(others):
        return _stage([f"the same {what} come in another order"])
    places, other_places = (
        {digest: place for place, digest in enumerate(side) if digest is not None and side.count(digest) == 1}
        for side in (digests, others)
    )
    for digest, place in places.items():
        if other_places.get(digest, place) != place:
            return _stage([f"of the {what}, the second has at {other_places[digest]} what the first has at {place}"])
    why = pair.first.batches.absent.get("index") or "neither indices nor files of samples were seen"
    return StageVerdict("", UNSEEN, why)


def batch_digests(seen: Observed) -> list[str | None]:
    """Return the digests of whole batches, in order."""
    return [batch.digest for batch in seen.batches.batches]


def _before(pair: CheckPair, _known: Known) -> StageVerdict:
    if not pair.samples:
        return _no_pairs(pair)
    contents = [(str(item), item.first.content, item.second.content) for item in pair.samples]
    return _of_items(contents, "samples", pair.first.batches.absent.get("before", "it was not seen"))


def _after(pair: CheckPair, known: Known) -> StageVerdict:
    """Compare collated samples and whole batches; a random transform differs as a consequence of another order, and
    what the trace saw of the inputs stands in for batches that cannot be hashed."""
    order, stage = known["order"].status, _after_as_collated(pair, known["order"].status)
    divergence = pair.divergence
    if order == stage.status == DIFFERS:
        differing = (item for item in pair.samples or () if item.differs(before=False))
        # A sample that draws draws differently at another place or in another worker; a label may follow the index.
        return replace(stage, status=FOLLOWS) if all(item.drew() or item.is_moved() for item in differing) else stage
    if stage.status == UNSEEN and order != DIFFERS and divergence is not None and divergence.origin == Origin.INPUT:
        return _stage([divergence.detail, f"as a whole: {stage.detail}"])
    return stage


def _after_as_collated(pair: CheckPair, order: str) -> StageVerdict:
    """Compare collated samples, and whole batches only where ``order``, the status of that stage, allows it."""
    why = pair.first.batches.absent.get("digest", "it was not seen")
    samples = [(str(item), item.first.after, item.second.after) for item in pair.samples or ()]
    if any(digest is not None for _, *digests in samples for digest in digests):
        of_samples = _of_items(samples, "samples", why)
        if of_samples.status == DIFFERS or order != EQUAL:
            return of_samples
    if order == DIFFERS:
        return _no_pairs(pair)
    batches = enumerate(zip_longest(*pair.of(batch_digests), fillvalue="no batch"))
    of_batches = _of_items([(f"batch {number}", *digests) for number, digests in batches], "batches", why)
    if of_batches.status == DIFFERS and order == UNSEEN:
        return _stage([of_batches.detail, "whether by their order or by their content was not seen"])
    return of_batches


def _weights(pair: CheckPair, _known: Known) -> StageVerdict:
    first, second = pair.of(lambda seen: seen.weights.by_name)
    if first is None or second is None:
        why = pair.first.weights.absent.get("parameters", "they were not seen")
        return _half_seen(first, second, "check has a model", why)
    return _counted(_differing(first, second), len({**first, **second}))


def _output(pair: CheckPair, _known: Known) -> StageVerdict:
    outputs, layers = pair.of(lambda seen: seen.outputs.predictions), pair.of(lambda seen: seen.layers)
    if outputs == layers == (None, None):
        return StageVerdict("", UNSEEN, pair.first.outputs.absent.get("predictions", "it was not seen"))
    for seen, other_seen in (outputs, layers):
        if (seen is None) != (other_seen is None):
            return _half_seen(seen, other_seen, "check saw it")
    words = []
    if outputs[0] != outputs[1]:
        words.append(join_limited(_differing(outputs[0] or {}, outputs[1] or {}), _SHOWN))
    if layers[0] != layers[1]:
        words.append(f"first layer that differs: {_first_layer(layers[0] or (), layers[1] or ())}")
    return _stage(words)


def _first_layer(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> str:
    for a, b in zip(first, second, strict=False):
        if a != b:
            return f"{a[0] or 'the model itself'} ({a[1]})" if a[:2] == b[:2] else f"{a[0]} / {b[0]}"
    return f"{len(first)} rows / {len(second)} rows"


def _kernel(pair: CheckPair, _known: Known) -> StageVerdict:
    first, second = pair.of(lambda seen: seen.trace)
    if first is None or second is None:
        why = pair.first.outputs.absent.get("predictions", "there is no trace")
        return _half_seen(first, second, "check has a trace", why)
    empty = [not trace.records and not trace.results for trace in (first, second)]
    if any(empty):
        return StageVerdict("", UNSEEN if all(empty) else DIFFERS, "the model ran no op of torch")
    if pair.verdict is None:
        return StageVerdict(
            "", UNSEEN, f"not compared: the traces are of {first.tracer} and {second.tracer}, and {OTHER_OPS}"
        )
    found = pair.divergence
    if found is not None:
        where = ", ".join(part for part in (found.origin, found.phase, found.module) if part)
        return _stage([f"{found.kernel or found.node} ({where}): {found.detail}"])
    if pair.verdict.differing:
        return _stage([f"{join_limited(pair.verdict.differing, _SHOWN)} differ"])
    losses = pair.of(lambda seen: seen.outputs.losses)
    return _stage(["the losses differ"] if losses[0] != losses[1] else [])


_OF_MODEL = ("first output", "kernel")
"""Stages whose difference is a consequence where any earlier stage differs."""

_JUDGES: Mapping[str, Callable[[CheckPair, Known], StageVerdict]] = MappingProxyType(
    {
        "environment": _environment,
        "file list": _files,
        "order": _order,
        "before transform": _before,
        "after transform": _after,
        "initial weights": _weights,
        "first output": _output,
        "kernel": _kernel,
    }
)
STAGES = tuple(_JUDGES)

# -------------------------------------------------------------------------------------------------------- words


def _stage(words: Iterable[str] = ()) -> StageVerdict:
    detail = "; ".join(words)
    return StageVerdict("", DIFFERS, detail) if detail else StageVerdict("", EQUAL)


def _half_seen(first: object, second: object, what: str, why: str = "") -> StageVerdict:
    """Return the stage where a check did not record it: its value is ``None``."""
    if first is None and second is None:
        return StageVerdict("", UNSEEN, why)
    return StageVerdict("", DIFFERS, f"only the {'second' if first is None else 'first'} {what}", one_sided=True)


def _no_pairs(pair: CheckPair) -> StageVerdict:
    if pair.samples is not None:
        return StageVerdict("", UNSEEN, "no sample is in both checks; look at more steps")
    absent = {**pair.second.batches.absent, **pair.first.batches.absent}
    return StageVerdict("", UNSEEN, absent.get("index") or absent.get("samples") or "single samples were not seen")


def _of_items(items: Sequence[tuple[str, object, object]], what: str, why: str) -> StageVerdict:
    """Compare items of (name, first value, second value), where ``None`` means not recorded.

    An item that neither check recorded is not equal: where no item differs, the stage is then unseen, with the reason
    ``why``.
    """
    differing = [item for item, seen, other_seen in items if seen != other_seen]
    unseen = sum(seen is None for _, seen, _ in items)
    if differing or not unseen:
        return _counted(differing, len(items), f" {what}")
    rest = f" ({unseen} of {len(items)} {what}; the others are equal)" if unseen < len(items) else ""
    return StageVerdict("", UNSEEN, why + rest)


def _counted(differing: Sequence[str], total: int, what: str = "") -> StageVerdict:
    return _stage([f"{len(differing)} of {total}{what}: {join_limited(differing, _SHOWN)}"] if differing else [])


def _first_place(what: str, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Describe the first position at which two sequences differ; empty where they are equal."""
    items = enumerate(zip_longest(first, second, fillvalue="nothing"))
    return next(([f"{what}: at {number} {a} / {b}"] for number, (a, b) in items if a != b), [])


def _differing(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]
