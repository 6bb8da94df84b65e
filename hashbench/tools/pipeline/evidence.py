"""Gather what two records show about a stage that differs. Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hashbench.core.records import Divergence
from hashbench.tools.pipeline.observed import (
    IMPORT,
    LOADER,
    MAKE_LOADER,
    MAKE_MODEL,
    SPANS,
    Observed,
    Sample,
    moved,
)
from hashbench.tools.pipeline.pairs import CheckPair, Span, united
from hashbench.tools.pipeline.stages import UNSEEN, Known, StageVerdict, batch_digests, changes


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """What is known of an order that differs.

    Attributes:
        same_indices: the sampler asked for the same indices.
        listing: the dataset's own list is in a different order.
        folder: a folder that the system lists in a different order in each check.
        no_generator: a shuffling sampler of torch was passed no generator.
        default_moved: torch's own generator was in a different state when the first batch was asked for.
        given_moved: generators of the loader or sampler that were.
    """

    same_indices: bool | None = None
    listing: bool = False
    folder: str = ""
    no_generator: bool | None = None
    default_moved: bool = False
    given_moved: tuple[str, ...] = ()

    @property
    def drawn_by_default(self) -> bool:
        """Whether a sampler of torch drew from torch's own generator in a different state."""
        return bool(self.no_generator) and self.default_moved


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What is known of the first sample that differs.

    Attributes:
        transform: the first whose output differs though its input does not.
        different_transforms: the transforms themselves differ.
        same_files: the files' bytes are equal.
        worker: the process that made the sample.
        moved_at_start: generators in a different state when the worker began.
        moved_by_init: those that only ``worker_init_fn`` moved apart.
    """

    transform: str = ""
    different_transforms: bool = False
    same_files: bool | None = None
    worker: int | None = None
    moved_at_start: tuple[str, ...] = ()
    moved_by_init: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model whose weights or results differ.

    Attributes:
        names_differ: different names or shapes of parameters.
        unseen: earlier stages that neither check recorded.
        divergence: of the traces.
    """

    names_differ: bool = False
    unseen: tuple[str, ...] = ()
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """The facts about a stage that differs; ``None`` and empty mean not known.

    Attributes:
        stage: its name.
        one_sided: only one check recorded the stage.
        arguments: the seeds, or for batches the arguments of the loaders, that differ, in words.
        imports: the user's modules were imported in a different order.
        hash_order: gone with an equal hash seed (``False``: stays).
        packages: versions that differ.
        whole: the code that made the batch that differs, where its samples were not recorded or are equal.
        here: code in which the difference entered.
        earlier: code that ran before it, in which the difference may originate.
        hash_calls: lines of the user's modules that call ``hash``.
        order, sample, model: what is known of this kind of stage alone.
    """

    stage: str
    one_sided: bool = False
    arguments: tuple[str, ...] = ()
    imports: bool = False
    hash_order: bool | None = None
    packages: str = ""
    whole: str = ""
    here: tuple[Span, ...] = ()
    earlier: tuple[Span, ...] = ()
    hash_calls: tuple[str, ...] = ()
    order: OrderFacts = OrderFacts()
    sample: SampleFacts = SampleFacts()
    model: ModelFacts = ModelFacts()

    @property
    def spans(self) -> tuple[Span, ...]:
        """All code in which the difference may originate, the likeliest first."""
        return (*self.here, *self.earlier)

    @property
    def drew(self) -> tuple[str, ...]:
        """The generators drawn from where the difference entered."""
        return united(*(span.drew for span in self.here))

    @property
    def drawn(self) -> tuple[str, ...]:
        """Those of :attr:`drew` that were in different states before."""
        return united(*(span.drawn for span in self.here))


def gather(pair: CheckPair, stages: Known, stage: StageVerdict) -> StageEvidence:
    """Return the facts about ``stage``."""
    settings, add_facts = _FACTS.get(stage.name, ((), None))
    imports = pair.of(lambda seen: seen.surroundings.imports)
    packages = pair.of(lambda seen: seen.surroundings.machine.get("packages"))
    evidence = StageEvidence(
        stage.name,
        one_sided=stage.one_sided,
        imports=imports[0] != imports[1] and sorted(imports[0]) == sorted(imports[1]),
        packages=", ".join(changes(*(side if isinstance(side, Mapping) else {} for side in packages))),
        arguments=tuple(_different_arguments(pair, settings)),
        hash_calls=united(*pair.of(lambda seen: seen.surroundings.hash_calls)),
    )
    return evidence if add_facts is None else add_facts(pair, evidence, stages)


def _different_arguments(pair: CheckPair, settings: tuple[str, ...]) -> list[str]:
    """List the settings of the user that differ: a difference that follows from them needs no other reason."""

    def value(seen: Observed, name: str) -> object:
        return sorted(seen.loader.generators) or "none" if name == "generators" else getattr(seen.loader, name)

    values = [(name, value(pair.first, name), value(pair.second, name)) for name in settings]
    return [f"{name} {a} / {b}" for name, a, b in values if a != b]


def _of_order(pair: CheckPair, evidence: StageEvidence, _stages: Known) -> StageEvidence:
    indices = pair.of(lambda seen: seen.batches.indices)
    first, second = pair.of(lambda seen: seen.loader.listing)
    by_default = pair.of(lambda seen: seen.loader.draws_by_default)
    order = OrderFacts(
        same_indices=None if None in indices else indices[0] == indices[1],
        listing=first is not None and second is not None and first.files != second.files,
        folder=_folder(pair),
        no_generator=by_default[0] if by_default[0] == by_default[1] else None,
        default_moved="torch" in moved(*pair.states(SPANS[LOADER][0])),
        given_moved=moved(*pair.of(lambda seen: seen.loader.generators)),
    )
    whole = _whole_made_by(pair)
    here = [*(pair.batch_spans(whole) if order.same_indices is None else ())]
    here += [_sampling(pair)] if order.same_indices is False else []
    return replace(evidence, order=order, whole=whole, here=(*here, *pair.spans(MAKE_LOADER, IMPORT)))


def _sampling(pair: CheckPair) -> Span:
    """Return the first call of the sampler: what the samples of the first batch and ``collate_fn`` drew, it did not."""
    (span,) = pair.spans(LOADER)
    first = [batch for seen in (pair.first, pair.second) for batch in seen.batches.batches[:1] if batch.worker is None]
    drawn = [batch.drew for batch in first] + [sample.drew for batch in first for sample in batch.samples or ()]
    elsewhere = {*united(*drawn)} - {"torch"}
    return replace(span, after=({}, {}), drew=tuple(name for name in span.drew if name not in elsewhere))


def _folder(pair: CheckPair) -> str:
    """Return a folder that has the same names in both checks, listed by the system in a different order; else an empty
    string."""
    twins = {folder.path: folder for folder in pair.second.loader.folders}
    for folder in pair.first.loader.folders:
        twin = twins.get(folder.path)
        if twin is not None and folder.as_set == twin.as_set and folder.in_order != twin.in_order:
            return "the folder of the files" if folder.path == "." else folder.path
    return ""


def _of_samples(pair: CheckPair, evidence: StageEvidence, _stages: Known) -> StageEvidence:
    """Add the facts on the first sample that differs, else on the first whole batch."""
    evidence = replace(evidence, earlier=tuple(pair.spans(MAKE_LOADER, IMPORT)))
    before = evidence.stage == "before transform"
    found = next((item for item in pair.samples or () if item.differs(before=before)), None)
    if found is None:
        batches = pair.first.batches.batches
        digests = enumerate(zip(*pair.of(batch_digests), strict=False))
        last = next((number for number, (a, b) in digests if a != b), len(batches) - 1)
        whole = _whole_made_by(pair, last)
        worker = _of_worker(pair, batches[last].worker if batches else None)
        return replace(evidence, whole=whole, here=tuple(pair.batch_spans(whole, last)), sample=worker)
    names = [None if step is None or before else step.transform for step in found.differing_steps()]
    digests_of_files = found.first.file_digests
    sample = replace(
        _of_worker(pair, found.batch.worker),
        transform=names[0] or "",
        different_transforms=names[0] != names[1],
        same_files=None if digests_of_files is None else digests_of_files == found.second.file_digests,
    )
    return replace(evidence, here=(found.span(before=before),), sample=sample)


def _whole_made_by(pair: CheckPair, number: int | None = None) -> str:
    """Name the code that made whole batches: of the batch ``number``, else of all."""
    if any(pair.of(lambda seen: "loader" in seen.loader.absent)):
        return LOADER
    samples = [
        sample
        for seen in (pair.first, pair.second)
        for batch in seen.batches.batches
        if number in (None, batch.number)
        for sample in batch.samples or (Sample(),)
    ]
    if all(sample.index is None for sample in samples):
        return "the dataset"
    return "collate_fn" if all(sample.after is not None for sample in samples) else "the dataset or collate_fn"


def _of_worker(pair: CheckPair, number: int | None) -> SampleFacts:
    """Return the generators whose states differed when the worker began, and those that only ``worker_init_fn`` moved
    apart."""
    workers = pair.of(lambda seen: [worker for worker in seen.random_state.workers if worker.worker == number])
    if not all(workers):
        return SampleFacts(worker=number)
    (a, *_), (b, *_) = workers
    at_start, initialised = moved(a.began, b.began), moved(a.initialised, b.initialised)
    by_init = tuple(name for name in initialised if name not in at_start)
    return SampleFacts(worker=number, moved_at_start=at_start, moved_by_init=by_init)


def _of_weights(pair: CheckPair, evidence: StageEvidence, _stages: Known) -> StageEvidence:
    forms = pair.of(lambda seen: {name: word.partition(":")[0] for name, word in (seen.weights.by_name or {}).items()})
    model = ModelFacts(names_differ=forms[0] != forms[1])
    return replace(evidence, model=model, here=tuple(pair.spans(MAKE_MODEL, MAKE_LOADER, IMPORT)))


def _of_model(pair: CheckPair, evidence: StageEvidence, stages: Known) -> StageEvidence:
    unseen = tuple(name for name in ("after transform", "initial weights") if stages[name].status == UNSEEN)
    return replace(evidence, model=ModelFacts(unseen=unseen, divergence=pair.divergence))


_AddFacts = Callable[[CheckPair, StageEvidence, Known], StageEvidence]
_OF_SAMPLES = ("seed", "num_workers", "worker_init_fn")
_FACTS: Mapping[str, tuple[tuple[str, ...], _AddFacts]] = MappingProxyType(
    {
        "order": (
            ("seed", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generators"),
            _of_order,
        ),
        "before transform": (_OF_SAMPLES, _of_samples),
        "after transform": (_OF_SAMPLES, _of_samples),
        "initial weights": (("seed",), _of_weights),
        "first output": ((), _of_model),
        "kernel": ((), _of_model),
    }
)
"""For each stage the fields of :class:`Loader` by which the user decides it, and what adds its own facts."""
