"""What a recording lacks is no reading that agrees, on recordings made by a rotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.extensions.watch.compare import compare
from hashbench.extensions.watch.file import Recording, Step, WatchHeader
from hashbench.extensions.watch.resume import judge
from hashbench.extensions.watch.rotation import Rotation

NAMES = tuple(f"layer.{number}.weight" for number in range(6))
SMALL = (4,) * 6
LARGE = tuple(2**20 * size for size in (5, 3, 4, 2, 6, 1))
STEPS = 12


def recording(name: str, *, every: int = 4, sizes: Sequence[int] = SMALL, begins: bool = True) -> Recording:
    """A recording as one is written: of small tensors each step has all, of large ones a share of them."""
    rotation = Rotation.of(list(zip(NAMES, sizes, strict=True)), every=every)
    steps = {}
    for number in range(STEPS):
        read = [NAMES[index] for index in rotation.read_at(number)]
        begin = {"parameter": dict.fromkeys(NAMES, f"p{number - 1}"), "buffer": {"mean": f"m{number - 1}"}}
        parts = {
            "batch": {"0": f"b{number}"},
            "generator": {"torch": "t"},
            "loss": {"0": f"l{number}"},
            "buffer": {"mean": f"m{number}"},
            "gradient": {one: f"g {one} {number}" for one in read},
            "lr": {"0": "0.1"},
            "parameter": {one: f"p {one} {number}" for one in read},
            "state": {f"{one}: momentum": f"s {one} {number}" for one in read},
        }
        begun = begin if every == 1 and number and begins else {}
        steps[number] = Step(number, parts, (0.5,), complete=rotation.reads_all, begin=begun)
    before = Step(-1, {"parameter": dict.fromkeys(NAMES, "p"), "buffer": {"mean": "m"}, "state": {}}, complete=True)
    final = replace(before, number=STEPS - 1)
    header = WatchHeader(2, 0, 1, None, every, "Net", "cpu", NAMES, ("mean",))
    return Recording(Path(name) / "rank0.jsonl", header, steps, before, "", [[list(NAMES)]], final)


def without(part: str, *names: str, at: int = 5) -> Callable[[Recording], Recording]:
    """Take a part out of a step, or names of it, as a forger does."""

    def change(one: Recording) -> Recording:
        parts = {**one.steps[at].parts}
        kept = {name: value for name, value in parts.pop(part).items() if name not in names}
        parts |= {part: kept} if names else {}
        return replace(one, steps={**one.steps, at: replace(one.steps[at], parts=parts)})

    return change


def lost_at_the_end(one: Recording) -> Recording:
    assert one.final is not None
    parts = {**one.final.parts, "parameter": dict.fromkeys(NAMES[1:], "p")}
    return replace(one, final=replace(one.final, parts=parts))


def lost_at_the_beginning(one: Recording) -> Recording:
    return replace(one, steps={**one.steps, 5: replace(one.steps[5], begin={})})


ROTATED = Rotation.of(list(zip(NAMES, LARGE, strict=True)), every=4).read_at(5)
TURN = NAMES[ROTATED[0]]

LACKS: dict[str, tuple[dict[str, object], Callable[[Recording], Recording], str]] = {
    "a part of each step": ({}, without("parameter"), "b lacks the part parameter in step 5, which"),
    "losses": ({}, without("loss"), "b lacks the part loss in step 5, which"),
    "gradients": ({}, without("gradient"), "b lacks the part gradient in step 5, which"),
    "a tensor of a complete step": ({}, without("parameter", NAMES[2]), f"b lacks the parameter {NAMES[2]} in step 5,"),
    "a buffer of a complete step": ({}, without("buffer", "mean"), "b lacks the buffer mean in step 5, which"),
    "a part of a rotation": ({"sizes": LARGE}, without("parameter"), "b lacks the part parameter in step 5, which"),
    "a tensor beside its gradient": ({"sizes": LARGE}, without("parameter", TURN), f"b lacks the parameter {TURN} "),
    "a tensor of the end": ({}, lost_at_the_end, f"b lacks the parameter {NAMES[0]} at the end, which"),
    "what a step began with": ({"every": 1}, lost_at_the_beginning, "b lacks the state that it began with in step 5,"),
}  # fmt: skip


@pytest.mark.parametrize(("made", "forge", "words"), LACKS.values(), ids=LACKS)
def test_what_one_run_lacks_is_no_equal_run(
    made: dict[str, object], forge: Callable[[Recording], Recording], words: str
) -> None:
    sound, bad = recording("a", **made), forge(recording("b", **made))  # type: ignore[arg-type]
    for pair in ((sound, bad), (bad, sound)):
        verdict = compare(*pair)
        assert (verdict.step, verdict.equal) == (None, False)
        assert [gap for gap in verdict.gaps if gap.startswith(words)], verdict.gaps
        assert not [gap for gap in verdict.gaps if gap.startswith("a ")]


@pytest.mark.parametrize("part", ["batch", "generator", "loss", "buffer", "gradient", "lr", "parameter", "state"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_part_that_both_runs_lack_in_a_step_is_missed_by_their_other_steps(part: str, every: int) -> None:
    forge = without(part)
    verdict = compare(forge(recording("a", every=every, sizes=LARGE)), forge(recording("b", sizes=LARGE)))
    assert (verdict.step, verdict.equal) == (None, False)
    assert verdict.gaps == tuple(f"{run} lacks the part {part} in step 5, which it should have." for run in "ab")


def test_a_whole_turn_that_one_run_lacks_is_missed() -> None:
    bad = recording("b", sizes=LARGE)
    for part in ("gradient", "parameter", "state"):
        names = list(bad.steps[5].parts[part])
        bad = without(part, *names)(bad)
    verdict = compare(recording("a", sizes=LARGE), bad)
    assert (verdict.step, verdict.equal) == (None, False)
    assert verdict.gaps[0].startswith(f"b lacks the parameter {sorted(NAMES[index] for index in ROTATED)[0]} in step 5")


TWINS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "small tensors": ({}, {}),
    "large tensors": ({"sizes": LARGE}, {"sizes": LARGE}),
    "another every": ({"sizes": LARGE}, {"sizes": LARGE, "every": 3}),
    "every step and a rotation": ({"sizes": LARGE, "every": 1}, {"sizes": LARGE}),
    "tensors of other sizes": ({"sizes": LARGE}, {"sizes": LARGE[::-1]}),
    "small and large tensors": ({}, {"sizes": LARGE}),
}


@pytest.mark.parametrize(("first", "second"), TWINS.values(), ids=TWINS)
def test_what_a_rotation_does_not_read_is_not_missed(first: dict[str, object], second: dict[str, object]) -> None:
    runs = recording("a", **first), recording("b", **second)  # type: ignore[arg-type]
    if first.get("sizes") != second.get("sizes"):  # another size is another digest, at the start and at the end as well
        assert runs[1].final is not None
        parts = {**runs[1].final.parts, "parameter": dict.fromkeys(NAMES, "of another size")}
        runs = runs[0], replace(runs[1], final=replace(runs[1].final, parts=parts))
        assert compare(*runs).gaps == ()
    else:
        assert compare(*runs).equal


@pytest.mark.parametrize("lost", ["parameter", "buffer"])
def test_a_digest_that_both_have_is_compared_whatever_else_is_missing(lost: str) -> None:
    bad = without(lost)(recording("b"))
    gradients = {**bad.steps[5].parts["gradient"], NAMES[3]: "x"}
    parts = {**bad.steps[5].parts, "gradient": gradients}
    bad = replace(bad, steps={**bad.steps, 5: replace(bad.steps[5], parts=parts)})
    verdict = compare(recording("a"), bad)
    assert (verdict.step, [(one.part, one.names) for one in verdict.differing]) == (5, [("gradient", (NAMES[3],))])
    assert verdict.gaps


def test_a_resumed_run_that_lacks_a_reading_is_not_judged_equal() -> None:
    whole, later = recording("a", every=1), recording("b", every=1)
    header = replace(later.header, start=4)
    steps = {number: one for number, one in later.steps.items() if number >= 4}
    steps[4] = replace(steps[4], begin={})
    before = replace(whole.steps[3], parts={**steps[4].parts, **whole.steps[4].begin, "state": {}})
    resumed = replace(later, header=header, steps=steps, before=before)
    assert judge(whole, resumed).gaps == ()
    (gap,) = judge(whole, without("parameter")(resumed)).gaps
    assert gap == "b lacks the part parameter in step 5, which it should have."
