"""Two checks to the stages at which they differ. Pure: plain values in, plain values out; imports no torch.

The stages in their order, and what is compared in each:

* ``environment``: machine, packages, torch's settings, and the order in which the user's modules were imported;
* ``file list``: the set of files that the dataset lists, else of those that were opened;
* ``order``: the dataset's own list, the indices that the sampler asked for, the files in the batches;
* ``before transform``: samples of the same file (else of the same index), as the first transform got them;
* ``after transform``: the same samples as they were collated, and the whole batches where their order is the same;
* ``initial weights``, ``first output``, ``kernel`` (the first divergence of the two traces).

What one of the two did not see differs from what the other saw: absent is never equal. What neither saw is ``unseen``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hashbench.divergence import find as find_divergence
from hashbench.records import Divergence
from hashbench.results.environments import environment_changes
from hashbench.text import a_few
from hashbench.tools.pipeline.observed import Digests, Observed, Sample, Step

STAGES = (
    "environment",
    "file list",
    "order",
    "before transform",
    "after transform",
    "initial weights",
    "first output",
    "kernel",
)
EQUAL, DIFFERS, UNSEEN, FOLLOWS = "equal", "differs", "unseen", "follows"
STATUSES = (EQUAL, DIFFERS, UNSEEN, FOLLOWS)
"""``follows``: it differs, as it must after what differed before it."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its name, one of :data:`STATUSES`, and in words what differs or why nothing is known."""

    name: str
    status: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same sample in two checks, and where it was in the first: batch number and worker."""

    name: str
    first: Sample
    second: Sample
    batch: int
    worker: int | None


def compared(first: Observed, second: Observed) -> tuple[tuple[Stage, ...], Divergence | None]:
    """All stages in order, and the first divergence of the traces where both have one."""
    pairs = samples_in_common(first, second)
    order = _order(first, second)
    after = _after(first, second, pairs, same_order=order.status == EQUAL)
    if order.status == DIFFERS and after.status == DIFFERS and _all_drew(pairs or ()):
        after = replace(after, status=FOLLOWS)  # who draws for another sample, or from another worker, draws otherwise
    weights = _weights(first, second)
    data = [_files(first, second), order, _before(first, second, pairs), after]
    output = _output(first, second)
    kernel, found = _kernel(first, second)
    earlier = any(stage.status == DIFFERS for stage in [*data, weights])
    follows = [
        replace(stage, status=FOLLOWS) if stage.status == DIFFERS and earlier else stage for stage in (output, kernel)
    ]
    if output.status == DIFFERS and not earlier and kernel.status == DIFFERS:
        follows[1] = kernel  # where in the model the output parts
    return (_environment(first, second), *data, weights, *follows), found


def first_that_differs(stages: Sequence[Stage]) -> Stage | None:
    """The first stage that differs. The environment is none: where nothing else differs, it has changed nothing."""
    return next((stage for stage in stages if stage.status == DIFFERS and stage.name != "environment"), None)


# ----------------------------------------------------------------------------------------------- the single stages


def _environment(first: Observed, second: Observed) -> Stage:
    changes = [
        f"{change.key} {change.base or 'absent'} / {change.new or 'absent'}"
        for change in environment_changes([_plain(first)], [_plain(second)])
    ]
    if first.surroundings.imports != second.surroundings.imports:
        changes.append(_order_words("the user's modules", first.surroundings.imports, second.surroundings.imports))
    return _stage("environment", changes)


def _plain(seen: Observed) -> Mapping[str, object]:
    around = seen.surroundings
    found: dict[str, object] = {**around.machine, "settings": dict(around.settings)}
    if around.hash_seed_by == "user":
        found["PYTHONHASHSEED"] = around.hash_seed
    found["seed of the pipeline"] = str(seen.loader.seed)
    return found


def _files(first: Observed, second: Observed) -> Stage:
    one, other = files_of(first), files_of(second)
    if one is None and other is None:
        why = first.batches.absent.get("files") or first.loader.absent.get("listing", "")
        return Stage("file list", UNSEEN, why or "neither check saw all files")
    if one is None or other is None:
        return Stage("file list", DIFFERS, f"only the {_which(one)} check saw the files")
    gone, new = Counter(one) - Counter(other), Counter(other) - Counter(one)
    words = [
        f"only in the {which}: {a_few(sorted(names), _SHOWN)}"
        for which, names in (("first", gone), ("second", new))
        if names
    ]
    return _stage("file list", words)


def files_of(seen: Observed) -> tuple[str, ...] | None:
    """The files of the dataset in its own order: those that it lists, else those that were opened if the whole loader
    was seen; ``None`` where neither is known."""
    if seen.loader.listing is not None:
        return seen.loader.listing.files
    samples = list(_samples(seen))
    if not seen.batches.exhausted or any(sample.files is None for sample in samples) or not samples:
        return None
    return tuple(file for sample in samples for file in sample.files or ())


def _order(first: Observed, second: Observed) -> Stage:
    words = []
    known = False
    one, other = first.loader.listing, second.loader.listing
    if one is not None and other is not None:
        known = True
        if one.files != other.files and sorted(one.files) == sorted(other.files):
            words.append(_order_words(f"the dataset's list ({one.attribute})", one.files, other.files))
    for what, a, b in (
        ("indices", indices_of(first), indices_of(second)),
        ("files in the batches", _opened(first), _opened(second)),
    ):
        if (a is None) != (b is None):
            words.append(f"only the {_which(a)} check saw the {what}")
        elif a is not None and b is not None:
            known = True
            words += [_order_words(what, a, b)] if a != b else []
    if not words and not known:  # whole samples, in the order in which they came
        return _order_of_samples(first, second)
    return _stage("order", words)


def _order_of_samples(first: Observed, second: Observed) -> Stage:
    one, other = ([sample.after for sample in _samples(seen)] for seen in (first, second))
    if not one or not other or None in one or None in other:
        one, other = ([batch.digest for batch in seen.batches.batches] for seen in (first, second))
    if one == other and None not in one:
        return Stage("order", EQUAL, "by content alone: neither indices nor files were seen")
    if None not in one and None not in other and Counter(one) == Counter(other):
        return Stage("order", DIFFERS, "the same samples come in another order")
    return Stage("order", UNSEEN, first.batches.absent.get("index") or "neither indices nor files of samples were seen")


def indices_of(seen: Observed) -> tuple[str, ...] | None:
    """What the dataset was asked for, in order; ``None`` where that was not seen of every sample."""
    found = [sample.index for sample in _samples(seen)]
    return tuple(one for one in found if one is not None) if found and None not in found else None


def _opened(seen: Observed) -> tuple[str, ...] | None:
    samples = list(_samples(seen))
    if not samples or any(sample.files is None for sample in samples):
        return None
    return tuple(" ".join(sample.files or ()) for sample in samples)


def _before(first: Observed, second: Observed, pairs: Sequence[Pair] | None) -> Stage:
    name = "before transform"
    if not pairs:
        return Stage(name, UNSEEN, _no_pairs(first, second, pairs))
    words, known = [], False
    for pair in pairs:
        contents = [(sample.before, sample.file_digests) for sample in (pair.first, pair.second)]
        known = known or contents[0] != (None, None)
        if contents[0] != contents[1]:
            words.append(f"{pair.name}{_place(pair)}")
    if not known and not words:
        return Stage(name, UNSEEN, first.batches.absent.get("before", "it was not seen"))
    return _counted(name, words, len(pairs))


def _after(first: Observed, second: Observed, pairs: Sequence[Pair] | None, *, same_order: bool) -> Stage:
    name = "after transform"
    digests = [[batch.digest for batch in seen.batches.batches] for seen in (first, second)]
    if pairs and any(pair.first.after is not None or pair.second.after is not None for pair in pairs):
        differing = [f"{pair.name}{_place(pair)}" for pair in pairs if pair.first.after != pair.second.after]
        if differing or not same_order:
            return _counted(name, differing, len(pairs))
    if not same_order:
        return Stage(name, UNSEEN, _no_pairs(first, second, pairs))
    if None in digests[0] and None in digests[1]:
        return Stage(name, UNSEEN, first.batches.absent.get("digest", "it was not seen"))
    places = [
        place
        for place in range(max(map(len, digests)))
        if digests[0][place : place + 1] != digests[1][place : place + 1]
    ]
    return _counted(name, [f"batch {place}" for place in places], max(map(len, digests)), "batches")


def _all_drew(pairs: Sequence[Pair]) -> bool:
    return all(drawn_where_it_differs(pair) for pair in pairs if pair.first.after != pair.second.after)


def first_step(pair: Pair) -> tuple[Step | None, Step | None]:
    """The first transform of each check whose output differs, or that is another one; ``None`` where there is none."""
    one, other = pair.first.steps or (), pair.second.steps or ()
    for place in range(max(len(one), len(other))):
        steps = tuple(side[place] if place < len(side) else None for side in (one, other))
        shown = [None if step is None else (step.transform, step.after) for step in steps]
        if shown[0] != shown[1]:
            return steps[0], steps[1]
    return None, None


def drawn_where_it_differs(pair: Pair) -> tuple[str, ...]:
    """The generators that were drawn from where the samples part: in the first transform that differs, else outside."""
    steps = [step for step in first_step(pair) if step is not None]
    found = [step.drew for step in steps] or [pair.first.drew_outside, pair.second.drew_outside]
    return tuple(dict.fromkeys(name for names in found for name in names))


def _weights(first: Observed, second: Observed) -> Stage:
    name = "initial weights"
    one, other = weights_by_name(first), weights_by_name(second)
    if one is None and other is None:
        return Stage(name, UNSEEN, first.weights.absent.get("parameters", "they were not seen"))
    if one is None or other is None:
        return Stage(name, DIFFERS, f"only the {_which(one)} check has a model")
    return _counted(
        name, [key for key in {**one, **other} if one.get(key) != other.get(key)], len({**one, **other}), ""
    )


def weights_by_name(seen: Observed) -> Digests | None:
    """Digests of parameters and buffers by name; ``None`` where there is no model."""
    if seen.weights.parameters is None:
        return None
    return {**seen.weights.parameters, **(seen.weights.buffers or {})}


def _output(first: Observed, second: Observed) -> Stage:
    name = "first output"
    one, other = first.outputs.predictions, second.outputs.predictions
    if one is None and other is None and first.layers is None and second.layers is None:
        return Stage(name, UNSEEN, first.outputs.absent.get("predictions", "it was not seen"))
    if (one is None) != (other is None) or (first.layers is None) != (second.layers is None):
        return Stage(name, DIFFERS, f"only the {_which(one if one != other else first.layers)} check saw it")
    words = []
    a, b = one or {}, other or {}
    if a != b:
        words.append(a_few([name for name in {**a, **b} if a.get(name) != b.get(name)], _SHOWN))
    if first.layers != second.layers:
        words.append(f"first layer that differs: {_first_layer(first.layers or (), second.layers or ())}")
    return _stage(name, words)


def _first_layer(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> str:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a[0] or 'the model itself'} ({a[1]})" if a[:2] == b[:2] else f"{a[0]} / {b[0]}"
    return f"{len(one)} rows / {len(other)} rows"


def _kernel(first: Observed, second: Observed) -> tuple[Stage, Divergence | None]:
    name = "kernel"
    if first.trace is None and second.trace is None:
        return Stage(name, UNSEEN, first.outputs.absent.get("predictions", "there is no trace")), None
    if first.trace is None or second.trace is None:
        return Stage(name, DIFFERS, f"only the {_which(first.trace)} check has a trace"), None
    empty = [not trace.records and not trace.results for trace in (first.trace, second.trace)]
    if any(empty):
        status = UNSEEN if all(empty) else DIFFERS
        return Stage(name, status, "the model ran no op of torch"), None
    verdict = find_divergence(first.trace, second.trace)
    found = verdict.divergence
    words = []
    if found is not None:
        place = ", ".join(part for part in (found.origin, found.phase, found.module) if part)
        words.append(f"{found.kernel or found.node} ({place}): {found.detail}")
    elif verdict.differing:
        words.append(f"{a_few(verdict.differing, _SHOWN)} differ")
    if not words and first.outputs.losses != second.outputs.losses:
        words.append("the losses differ")
    return _stage(name, words), found


# ------------------------------------------------------------------------------------------------------ samples


def samples_in_common(first: Observed, second: Observed) -> tuple[Pair, ...] | None:
    """Each sample that both checks saw, in the order of the first: matched by its files, else by its index. ``None``
    where samples cannot be told apart."""
    by_file = all(_all_have_files(seen) for seen in (first, second))
    found = []
    known = {name: sample for name, sample, _, _ in _named(second, by_file=by_file)}
    if not known:
        return None
    for name, sample, batch, worker in _named(first, by_file=by_file):
        if name in known:
            found.append(Pair(name, sample, known[name], batch, worker))
    return tuple(found)


def _named(seen: Observed, *, by_file: bool) -> Iterator[tuple[str, Sample, int, int | None]]:
    """Samples with a name that is unique: one that was drawn twice has a count."""
    counts: Counter[str] = Counter()
    for batch in seen.batches.batches:
        for sample in batch.samples or ():
            if not by_file and sample.index is None:
                continue
            name = " ".join(sample.files or ()) if by_file else f"sample {sample.index}"
            counts[name] += 1
            number = f" ({counts[name]})" if counts[name] > 1 else ""
            yield f"{name}{number}", sample, batch.number, batch.worker


def _all_have_files(seen: Observed) -> bool:
    samples = list(_samples(seen))
    return bool(samples) and all(sample.files for sample in samples)


def _samples(seen: Observed) -> Iterator[Sample]:
    for batch in seen.batches.batches:
        yield from batch.samples or ()


# -------------------------------------------------------------------------------------------------------- words


def _stage(name: str, words: Sequence[str]) -> Stage:
    return Stage(name, DIFFERS, "; ".join(words)) if words else Stage(name, EQUAL)


def _counted(name: str, differing: Sequence[str], total: int, what: str = "samples") -> Stage:
    if not differing:
        return Stage(name, EQUAL)
    return Stage(name, DIFFERS, f"{len(differing)} of {total} {what}".rstrip() + f": {a_few(differing, _SHOWN)}")


def _place(pair: Pair) -> str:
    return f" (batch {pair.batch}{'' if pair.worker is None else f', worker {pair.worker}'})"


def _no_pairs(first: Observed, second: Observed, pairs: Sequence[Pair] | None) -> str:
    if pairs is not None:
        return "no sample is in both checks; look at more steps"
    absent = {**second.batches.absent, **first.batches.absent}
    return absent.get("index") or absent.get("samples") or "single samples were not seen"


def _order_words(what: str, one: Sequence[str], other: Sequence[str]) -> str:
    place = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    a, b = (side[place] if place < len(side) else "nothing" for side in (one, other))
    return f"{what}: at {place} {a} / {b}"


def _which(value: object) -> str:
    return "second" if value is None else "first"
