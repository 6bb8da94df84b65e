"""What torch's rule accepts of a compiled run although it is far off, and of which eager mode is less exact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hashbench.core.inductor.graphs import CompiledGraph
from hashbench.core.run.outcome import Run, RunMaker
from hashbench.core.text import join_limited
from hashbench.extensions.compiled.accuracy import Accepted, Farther, by_cosine_only, farther, inaccurate, worse
from hashbench.extensions.compiled.amplification import Amplification
from hashbench.extensions.compiled.observed import KernelWatcher
from hashbench.extensions.compiled.program import CompiledModel
from hashbench.extensions.compiled.roundings import moved_by_rounding
from hashbench.extensions.compiled.units import EXPLAINED


@dataclass(frozen=True, slots=True)
class Doubts:
    """What the status of a compiled run does not say.

    Attributes:
        texts: each in words.
        asks: it is to be explained: rounding may not be what it is.
    """

    texts: tuple[str, ...] = ()
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """What compiled runs of a model are compared with.

    Attributes:
        model: as it is run.
        eager: its run in eager mode.
        exact: its run in float64; ``None``: it failed.
    """

    model: CompiledModel
    eager: Run
    exact: Run | None

    @property
    def _results(self) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        return self.model.results(self.eager), None if self.exact is None else self.model.results(self.exact)

    def exceeding_tolerance(self, run: Run) -> tuple[str, ...]:
        """Return the names of the results of a compiled run that are not accurate."""
        eager, exact = self._results
        return inaccurate(eager, self.model.results(run), exact, self.model.tolerance)

    def doubts(
        self, run: Run, program: RunMaker, graphs: Mapping[str, CompiledGraph], *, refused: Collection[str]
    ) -> Doubts:
        """Return what is accepted and far off, and where eager mode is less exact.

        Args:
            run: of compiled code.
            program: the compiled model.
            graphs: of it.
            refused: names of results that are not accepted, which says enough.
        """
        (eager, exact), compiled, tolerance = self._results, self.model.results(run), self.model.tolerance
        texts = []
        if alike := by_cosine_only(eager, compiled, exact, tolerance):
            why = "" if exact is not None else ", as there is no float64 reference"
            texts.append(f"compared by cosine similarity only{why}: {join_limited(tuple(map(_how_far, alike)))}")
        far = worse(eager, compiled, exact)
        if far is not None and far.name not in refused:
            texts.append(f"the compiled model is far from float64: {_how_far(far)}")
        moved = farther(eager, compiled, exact, tolerance)
        if moved is None:
            return Doubts(tuple(texts), bool(texts))
        text = f"eager mode is farther from float64 in {moved.name}: {moved.eager:.2g}, compiled {moved.compiled:.2g}"
        if not self._is_rounding(moved):
            return Doubts((*texts, f"{text}, by more than rounding explains: what is right is not known"), asks=True)
        return Doubts((*texts, text + _where_most_is_lost(program, graphs)), bool(texts))

    def _is_rounding(self, moved: Farther) -> bool:
        """Return whether eager mode's own error has the size of rounding; also where that cannot be measured."""
        explained = moved_by_rounding(self.model.step, moved.name)
        return explained is None or moved.largest <= EXPLAINED * explained


def _how_far(accepted: Accepted) -> str:
    eager = "" if accepted.eager is None else f", eager mode {accepted.eager:.2g}"
    return f"{accepted.name} is {accepted.off:.2g} off{eager}"


def _where_most_is_lost(program: RunMaker, graphs: Mapping[str, CompiledGraph]) -> str:
    amplification = Amplification(eager=True)
    run = program(watcher=KernelWatcher(graphs, amplification)) if graphs else None
    worst = amplification.result() if isinstance(run, Run) else ()
    if not worst or not worst[0].facts.op:
        return ""
    facts = worst[0].facts
    return f"; most is lost by {facts.op}{f' in {facts.module}' if facts.module else ''}"
