"""Format recordings and verifications of kernels as text. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

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


def verified_text(
    verification: Verification, *, recorded: Mapping[str, Any], here: Mapping[str, Any], next_command: str = ""
) -> str:
    """Format a verification: changed kernels by library, kernels not compared, and a summary by op.

    Args:
        verification: result for all kernels.
        recorded: environment of the recording.
        here: environment of this machine.
        next_command: the command that verifies again.
    """
    changes, changed = ", ".join(environment_changes(recorded, here)), verification.changed
    since = changes or "the environment is the same"
    lines = [f"{len(changed)} of {count(verification.kernels, 'kernel')} changed ({since})"]
    for library, members in by_library(changed).items():
        lines += ["", library, *(f"  {_line(change)}" for change in members)]
    lines.append("")
    for reason, kernels in sorted(verification.not_run.items()):
        ops = join_limited(list(dict.fromkeys(kernel.op for kernel in kernels)), _MODELS)
        lines.append(f"not compared, {reason}: {len(kernels)} ({ops})")
    lines.append(f"the same: {verification.same}; left out when recorded, in calls: {_counts(verification.left_out)}")
    if changed:
        lines.append("Differences are the largest of the few elements of each output that are kept.")
        lines += ["", "Changed by op, in calls of one run of each model:"]
        lines += [f"  {op}: {some} of {count(every, 'call')}" for op, some, every in changed_calls(verification)]
    if changed and changes and next_command:
        lines += ["", f"Next: `{next_command}` with one of these settings as recorded shows whether it explains this."]
    return "\n".join(lines)


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


def five_lines(
    name: str,
    file: str,
    verification: Verification,
    *,
    new: Sequence[Kernel],
    gone: Sequence[Kernel],
    environments: tuple[Mapping[str, Any], Mapping[str, Any]],
    kept: str,
) -> str:
    """Format the failure of a pytest fingerprint check in five lines.

    How many kernels changed since the recording; all of them by library and op; the one that changed most; other
    deviations; what to do.

    Args:
        name: of the model.
        file: name of the recording's file.
        verification: result for the recorded kernels.
        new: kernels that the model calls and that were not recorded.
        gone: recorded kernels that it no longer calls.
        environments: of the recording, and now.
        kept: path of the full list.
    """
    changed, all_of = verification.changed, count(verification.kernels, "kernel")
    since = ", ".join(environment_changes(*environments)) or "the environment is the same"
    largest = max(changed, key=_magnitude, default=None)
    libraries = [f"{library}: {_ops(members)}" for library, members in by_library(changed).items()]
    others = [f"{len(kernels)} cannot be run: {reason}" for reason, kernels in sorted(verification.not_run.items())]
    others += [f"{text} ({_names(kernels)})" for text, kernels in (
        ("it now calls kernels that were not recorded", new),
        ("it no longer calls recorded ones", gone),
    ) if kernels]  # fmt: skip
    lines = (
        cut_line(f"{name}: {len(changed)} of {all_of} changed since {file} was recorded ({since})"),
        one_line(f"changed: {'; '.join(libraries) or 'none'}"),
        cut_line(f"largest: {_line(largest)}" if largest is not None else "largest: no kernel changed"),
        cut_line(f"the others: {'; '.join([f'{verification.same} the same', *others])}"),
        one_line(
            "to do: test again with a setting as recorded, to see whether it explains this. Where the change is meant,"
            f" record it again with `pytest --hashbench-record`. Each kernel: {kept}"
        ),
    )
    return "\n".join(lines)


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


def _line(change: ChangedKernel) -> str:
    """Format a changed kernel in one line.

    ``aten.mm.default(float32[8,64], float32[64,8])  forward, backward; in net_a; 3 ulp, 2.1e-07 relative``.
    """
    kernel, checked = change.kernel, change.checked
    told = [kernel.phase, f"in {join_limited(change.models, _MODELS)}", distance_text(change)]
    if checked.note:
        told.append(f"outputs {checked.note}")
    if checked.library and checked.library != kernel.library:
        told.append(f"{kernel.library} -> {checked.library}")
    return f"{kernel.shown}  {'; '.join(told)}"


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
