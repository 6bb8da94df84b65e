"""Report on recordings and verifications of kernels. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hashbench.core.finding import Finding, Table, few
from hashbench.core.io import to_json
from hashbench.core.text import count, cut_line, join_limited, one_line, ulps
from hashbench.extensions.fingerprint.document import Fingerprints, Kernel
from hashbench.extensions.fingerprint.verify import ChangedKernel, Verification

_MODELS = 3
"""Maximum number of models named per kernel."""


def recorded_text(fingerprints: Fingerprints, *, nbytes: int) -> str:
    """Format a recording: one line per model, and a total."""
    lines = []
    for model in fingerprints.models:
        calls: dict[str, int] = {reason: sum(ops.values()) for reason, ops in model.left_out.items()}
        lines.append(f"{model.name}: {count(len(model.kernels), 'kernel')}; left out: {_counts(calls)}")
    lines.append(f"{count(len(fingerprints.models), 'model')}, {count(fingerprints.kernels, 'kernel')}, {nbytes} bytes")
    return "\n".join(lines)


def finding_of(
    verification: Verification, *, recorded: Mapping[str, Any], here: Mapping[str, Any], command: str = ""
) -> Finding:
    """Return the report of a verification: changed kernels by library and by op, and kernels not compared.

    Args:
        verification: result for all kernels.
        recorded: environment of the recording.
        here: environment of this machine.
        command: verifies again.
    """
    changes, changed = ", ".join(environment_changes(recorded, here)), verification.changed
    notes = ("Differences are the largest of the few elements of each output that are kept.",) if changed else ()
    explains = "Verify again with one of these settings as recorded: that shows whether it explains this."
    calls = tuple((op, f"{some} of {count(every, 'call')}") for op, some, every in changed_calls(verification))
    by_op = Finding(
        headline="Changed by op, in calls of one run of each model", table=Table("", ("op", "calls"), calls)
    )
    return Finding(
        headline=f"{len(changed)} of {count(verification.kernels, 'kernel')} changed",
        facts=(
            ("environment", changes or "the same as recorded"),
            ("the same", str(verification.same)),
            *_not_compared(verification),
            ("left out", f"when recorded, in calls: {_counts(verification.left_out)}"),
        ),
        table=Table.of_lines("", _kernel_lines(changed)),
        notes=(*notes, explains) if changed and changes else notes,
        next=(command,) if changed and changes and command else (),
        parts=(by_op,) if changed else (),
        equal=not changed,
        differs=bool(changed),
        data={name: value for name, value in to_json(verification).items() if name != "models"},
    )


def _not_compared(verification: Verification) -> Iterator[tuple[str, str]]:
    for reason, kernels in sorted(verification.not_run.items()):
        ops = few(list(dict.fromkeys(kernel.op for kernel in kernels)))
        yield "not compared", one_line(f"{len(kernels)} ({ops}): {reason}")


def _kernel_lines(changed: Sequence[ChangedKernel]) -> Iterator[str]:
    for library, members in by_library(changed).items():
        yield library
        for change in members:
            yield f"  {change.kernel.shown}"
            yield f"    {_told(change)}"


def changed_calls(verification: Verification) -> list[tuple[str, int, int]]:
    """Return for each op with a changed kernel its name, and how many of its calls changed; the most calls first."""
    changed = {change.kernel.outcome() for change in verification.changed}
    some: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for kernel in (kernel for model in verification.models for kernel in model.kernels):
        every[kernel.op] += kernel.calls
        some[kernel.op] += kernel.calls if kernel.outcome() in changed else 0
    ops = dict.fromkeys(change.kernel.op for change in verification.changed)
    return sorted(((op, some[op], every[op]) for op in ops), key=lambda each: -each[1])


def failure_of(
    verified: Finding,
    verification: Verification,
    *,
    since: str,
    new: Sequence[Kernel],
    gone: Sequence[Kernel],
    how_to_record: str,
) -> Finding:
    """Return the report of a failed test: changed kernels by library and op, and the one that changed most.

    Args:
        verified: the report of all kernels.
        verification: result for the recorded kernels.
        since: name of the recording's file.
        new: kernels that the model calls and that were not recorded.
        gone: recorded kernels that it no longer calls.
        how_to_record: the command or call that records the file again.
    """
    libraries = [f"{library}: {_ops(members)}" for library, members in by_library(verification.changed).items()]
    largest = max(verification.changed, key=_magnitude, default=None)
    return replace(
        verified,
        headline=f"{verified.headline} since {since} was recorded",
        facts=(
            ("changed", one_line("; ".join(libraries))),
            ("largest", "" if largest is None else cut_line(f"{largest.kernel.shown}  {_told(largest)}")),
            ("not recorded", _names(new)),
            ("no longer called", _names(gone)),
            *verified.facts,
        ),
        table=None,
        notes=(
            "Test again with a setting as recorded: that shows whether it explains this. Where the change is meant, "
            "record it again.",
        ),
        next=(how_to_record,),
        parts=(),
        equal=False,
        differs=True,
    )


def _magnitude(change: ChangedKernel) -> tuple[float, int, int]:
    distance = change.checked.distance
    return distance.max_relative or 0.0, distance.max_ulp or 0, distance.differing


def _ops(changes: Sequence[ChangedKernel]) -> str:
    """Format changed kernels by op, each with their number and largest distance."""
    groups: defaultdict[str, list[ChangedKernel]] = defaultdict(list)
    for change in changes:
        groups[change.kernel.op].append(change)
    return ", ".join(
        f"{op}{f' x {len(members)}' if len(members) > 1 else ''} ({_how_far(max(members, key=_magnitude))})"
        for op, members in groups.items()
    )


def _names(kernels: Sequence[Kernel]) -> str:
    ops: defaultdict[str, int] = defaultdict(int)
    for kernel in kernels:
        ops[kernel.op] += 1
    return join_limited([f"{op}{f' x {number}' if number > 1 else ''}" for op, number in ops.items()], 6)


def by_library(changed: Sequence[ChangedKernel]) -> dict[str, list[ChangedKernel]]:
    """Group changed kernels by the library that computed them when recorded, the largest group first."""
    groups: defaultdict[str, list[ChangedKernel]] = defaultdict(list)
    for change in changed:
        groups[family(change.kernel.library)].append(change)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def family(library: str) -> str:
    """Return the library names without those of their kernels.

    >>> family("oneDNN jit_dw:avx512_core, oneDNN x64:gemm:jit"), family("MKL SGEMM"), family("ATen native")
    ('oneDNN', 'MKL', 'ATen native')
    """
    names = (name.partition(" ")[0] if name.startswith(("oneDNN ", "MKL ")) else name for name in library.split(", "))
    return ", ".join(dict.fromkeys(names)) or "unknown"


def _told(change: ChangedKernel) -> str:
    """Format how a kernel changed: ``forward, backward; in net_a; 3 ulp, 2.1e-07 relative``."""
    kernel, checked = change.kernel, change.checked
    parts = [kernel.phase, f"in {join_limited(change.models, _MODELS)}", distance_text(change)]
    if checked.note:
        parts.append(f"outputs {checked.note}")
    if checked.library and checked.library != kernel.library:
        parts.append(f"{kernel.library} -> {checked.library}")
    return one_line("; ".join(parts))


def distance_text(change: ChangedKernel) -> str:
    """Format the distance of the sampled elements."""
    distance = change.checked.distance
    if not distance.samples or not distance.differing:
        return _how_far(change)
    return f"{_how_far(change)} ({distance.differing} of {distance.samples} kept elements differ)"


def _how_far(change: ChangedKernel) -> str:
    distance = change.checked.distance
    if not distance.samples:
        return "no elements kept"
    if not distance.differing:
        return f"none of {count(distance.samples, 'kept element')} differs"
    ulp = ulps(distance.max_ulp).lower()
    relative = "" if distance.max_relative is None else f"{distance.max_relative:.1e} relative"
    return ", ".join(filter(None, [ulp, relative])) or "no numbers"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items())) or "nothing"


def environment_changes(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """List differences of two environments that may change a kernel: ``torch 2.15.0 -> 2.15.1``."""
    old, new = _facts(recorded), _facts(here)
    return [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _facts(environment: Mapping[str, Any]) -> dict[str, str]:
    def part(name: str) -> Mapping[str, Any]:
        value = environment.get(name)
        return value if isinstance(value, dict) else {}

    torch = part("packages").get("torch")
    facts = {"torch": torch} | dict(part("libraries"))
    facts |= {"CPU": part("cpu").get("model"), "capability": part("torch").get("cpu_capability")}
    facts |= {"threads": part("threads").get("intra_op"), "device": part("device").get("name")}
    facts |= {name: value for name, value in part("variables").items() if name != "OMP_WAIT_POLICY"}
    return {name: str(value)[:80] for name, value in facts.items() if value is not None}
