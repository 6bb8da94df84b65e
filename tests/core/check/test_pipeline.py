"""Further pairs, drafts, a search that raises, and which of two verdicts stands: runs are given, none is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from hashbench.core.catalog import Status
from hashbench.core.check.pipeline import CONFIRMING_PAIRS, Search, checked, confirm, confirmation, replaces, searched
from hashbench.core.records import Divergence, Leaf, OpRecord, Ref, TensorDigest, Trace, Verdict
from hashbench.core.run.outcome import Outcome

CONTENT = TensorDigest("float32", (4,), (1,), "a")
OTHER = CONTENT._replace(value="b")
POOL = Leaf("other/#0", "other", CONTENT, 0)
VIEW = OpRecord("v", "forward", 0, "Net", "aten.slice.Tensor", arguments="0, 4")
PLAIN = Divergence("outside", "v", "aten.slice.Tensor", 0, "forward", 0, "Net", "", "")
KERNEL = Divergence("kernel", "k", "aten.mv.default", 3, "forward", 0, "Net", "", "")


def verdict(divergence: Divergence | None) -> Verdict:
    return Verdict(("output",), divergence, ())


def traces(view: OpRecord = VIEW, pool: Leaf = POOL) -> tuple[Trace, Trace]:
    """The pair with hashed inputs: its second trace holds ``view`` and ``pool``."""
    return Trace((VIEW,), (POOL,)), Trace((view,), (pool,))


WRITE = replace(VIEW, arguments="", inputs=(Ref("0", "other/#0", 0, written=True),), outputs=(CONTENT,))
HIDDEN = replace(KERNEL, origin="outside", opaque_producer=True)
MOVED = traces(view=replace(VIEW, arguments="2, 6"))
CHANGED = traces(pool=replace(POOL, digest=OTHER))
TENSOR, LATE = replace(PLAIN, node="other/#0"), replace(PLAIN, op_index=5)


@pytest.mark.parametrize(
    ("hashed", "plain", "pair", "expected"),
    [
        pytest.param(PLAIN, replace(KERNEL, node="m"), traces(), True, id="a kernel was blamed, memory not looked at"),
        pytest.param(KERNEL, KERNEL, traces(), True, id="both blame the same"),
        pytest.param(KERNEL, PLAIN, MOVED, True, id="a view was blamed that shows the same at another place"),
        pytest.param(HIDDEN, PLAIN, MOVED, True, id="a view was blamed, and memory was written behind torch"),
        pytest.param(replace(HIDDEN, opaque_producer=False), PLAIN, MOVED, False, id="an argument is blamed instead"),
        pytest.param(
            KERNEL,
            PLAIN,
            (Trace((WRITE,)), Trace((replace(WRITE, inputs=(WRITE.inputs[0]._replace(offset=4),)),))),
            True,
            id="a write was blamed that went to another part",
        ),
        pytest.param(KERNEL, PLAIN, traces(), False, id="a view was blamed that did not move this time"),
        pytest.param(KERNEL, TENSOR, CHANGED, True, id="a tensor was blamed of which nothing else was read"),
        pytest.param(KERNEL, TENSOR, traces(), False, id="a tensor was blamed that is equal this time"),
        pytest.param(replace(KERNEL, op_index=0), LATE, MOVED, False, id="the kernel lies before what was blamed"),
        pytest.param(replace(KERNEL, origin="rng"), PLAIN, MOVED, False, id="a generator is blamed instead"),
    ],
)
def test_which_verdict_is_kept(
    hashed: Divergence, plain: Divergence, pair: tuple[Trace, Trace], expected: bool
) -> None:
    assert replaces(verdict(hashed), verdict(plain), pair) is expected


def test_hashed_divergence_replaces_none() -> None:
    assert replaces(verdict(KERNEL), None, traces())


PAIRS: dict[str, tuple[Divergence | None, Divergence | None, int, str]] = {
    "the same place": (KERNEL, KERNEL, 1, "yes"),
    "the same place, later": (KERNEL, KERNEL, 3, "yes (in pair 3)"),
    "nothing was known": (None, KERNEL, 1, "yes"),
    "nothing is known now": (PLAIN, None, 1, "yes"),
    "memory below a kernel": (KERNEL, PLAIN, 2, "yes (in pair 2): with inputs hashed; without, kernel at k"),
    "another place": (PLAIN, KERNEL, 1, "differs again, there by kernel at k"),
}


@pytest.mark.parametrize(("plain", "hashed", "pairs", "words"), PAIRS.values(), ids=PAIRS)
def test_words_of_a_further_pair(plain: Divergence | None, hashed: Divergence | None, pairs: int, words: str) -> None:
    assert confirmation(verdict(plain), verdict(hashed), pairs=pairs) == words


# ------------------------------------------------------------------------------------------------------ the stages

DIFFERS = Outcome(Status.TWO_RUNS_DIFFER, "on", verdict=verdict(PLAIN))


@dataclass
class Given:
    """Runs of which it is given what they show: a further pair differs from the ``differing``-th on."""

    outcome: Outcome = DIFFERS
    differing: int = 1
    find: Callable[[Outcome], Outcome] | None = None
    done: list[str] = field(default_factory=list)

    def repeat(self) -> Outcome:
        self.done.append("repeat")
        return self.outcome

    def keep_draft(self, outcome: Outcome) -> None:
        self.done.append(f"draft {outcome.confirmed}".rstrip())

    def further_pair(self, outcome: Outcome, *, number: int) -> Outcome | None:
        self.done.append(f"pair {number}")
        return replace(outcome, confirmed="yes") if number >= self.differing else None

    def search(self, outcome: Outcome) -> Search | None:
        find = self.find
        return None if find is None else lambda: find(outcome)


def test_a_difference_is_confirmed_and_diagnosed_with_a_draft_before_each() -> None:
    runs = Given(differing=2, find=lambda outcome: replace(outcome, untraced="found"))
    outcome = checked(runs)
    assert (outcome.confirmed, outcome.untraced) == ("yes", "found")
    assert runs.done == ["repeat", "draft", "pair 1", "pair 2", "draft yes"]


def test_what_passes_is_neither_confirmed_nor_written_down() -> None:
    runs = Given(Outcome(Status.PASS, "on"))
    assert checked(runs) == runs.outcome
    assert runs.done == ["repeat"]


def test_a_rare_difference_is_looked_for_a_few_times() -> None:
    runs = Given(differing=CONFIRMING_PAIRS + 1)
    assert confirm(runs, DIFFERS).confirmed == "no: 3 further pairs agreed"
    assert runs.done == ["draft", "pair 1", "pair 2", "pair 3"]


def _raising(_: Outcome) -> Outcome:
    raise ValueError("no such op")


def test_a_search_that_raises_is_a_cause_that_is_unknown() -> None:
    diagnosis = checked(Given(find=_raising)).diagnosis
    assert diagnosis is not None
    assert (diagnosis.decision.cause, diagnosis.decision.confidence) == ("unknown", "open")
    assert diagnosis.decision.because == "the diagnosis failed: ValueError: no such op"


def test_a_check_can_say_itself_that_its_search_raised() -> None:
    found = searched(
        DIFFERS,
        lambda: _raising(DIFFERS),
        keep_draft=lambda _: None,
        failed=lambda outcome, because: replace(outcome, untraced=because),
    )
    assert (found.diagnosis, found.untraced) == (None, "the diagnosis failed: ValueError: no such op")
