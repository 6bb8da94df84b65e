"""What became of recorded kernels, in words. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from hashbench.fingerprint.document import Fingerprints
from hashbench.fingerprint.verify import Change, Verification
from hashbench.text import a_few, count

_MODELS = 3
"""That are named of those that call a kernel."""


def recorded_text(fingerprints: Fingerprints, *, nbytes: int) -> str:
    """A line for each model that was recorded, and one for all."""
    lines = []
    for model in fingerprints.models:
        calls: dict[str, int] = {reason: sum(ops.values()) for reason, ops in model.left_out.items()}
        lines.append(f"{model.name}: {count(len(model.kernels), 'kernel')}; left out: {_counts(calls)}")
    lines.append(f"{count(len(fingerprints.models), 'model')}, {count(fingerprints.kernels, 'kernel')}, {nbytes} bytes")
    return "\n".join(lines)


def verified_text(verification: Verification, *, recorded: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What became of all kernels since they were recorded in the environment ``recorded``; this is ``here``."""
    changes = ", ".join(environment_changes(recorded, here)) or "the environment is the same"
    changed = verification.changed
    head = f"{len(changed)} of {count(verification.kernels, 'kernel')} changed ({changes})"
    lines = [head]
    for library, members in by_library(changed).items():
        lines += ["", library, *(f"  {_line(change)}" for change in members)]
    lines.append("")
    for reason, kernels in sorted(verification.not_run.items()):
        ops = a_few(list(dict.fromkeys(kernel.op for kernel in kernels)), _MODELS)
        lines.append(f"not compared, {reason}: {len(kernels)} ({ops})")
    lines.append(f"the same: {verification.same}; left out when recorded, in calls: {_counts(verification.left_out)}")
    if changed:
        lines.append("Differences are the largest of the few elements of each output that are kept.")
    return "\n".join(lines)


def by_library(changed: Sequence[Change]) -> dict[str, list[Change]]:
    """Changed kernels by the library that computed them when they were recorded, the largest group first."""
    groups: defaultdict[str, list[Change]] = defaultdict(list)
    for change in changed:
        groups[family(change.kernel.library)].append(change)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def family(library: str) -> str:
    """The libraries in what a kernel says of them, without their own kernels.

    >>> family("oneDNN jit_dw:avx512_core, oneDNN x64:gemm:jit"), family("MKL SGEMM"), family("ATen native")
    ('oneDNN', 'MKL', 'ATen native')
    """
    names = [re.sub(r"^(oneDNN|MKL) .*", r"\1", name) for name in library.split(", ")]
    return ", ".join(dict.fromkeys(names)) or "unknown"


def _line(change: Change) -> str:
    """``aten.mm.default(float32[8,64], float32[64,8])  forward, backward; in net_a; 3 ulp, 2.1e-07 relative``."""
    kernel, checked = change.kernel, change.checked
    told = [kernel.phase, f"in {a_few(change.models, _MODELS)}", distance_text(change)]
    if checked.note:
        told.append(f"outputs {checked.note}")
    if checked.library and checked.library != kernel.library:
        told.append(f"{kernel.library} -> {checked.library}")
    return f"{kernel.shown}  {'; '.join(told)}"


def distance_text(change: Change) -> str:
    """How far apart the kept elements are."""
    distance = change.checked.distance
    if not distance.samples:
        return "no elements kept"
    if not distance.differing:
        return f"none of {count(distance.samples, 'kept element')} differs"
    ulp = "" if distance.max_ulp is None else f"{distance.max_ulp} ulp"
    relative = "" if distance.max_relative is None else f"{distance.max_relative:.1e} relative"
    numbers = ", ".join(filter(None, [ulp, relative])) or "no numbers"
    return f"{numbers} ({distance.differing} of {distance.samples} kept elements differ)"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items())) or "nothing"


def environment_changes(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is different in two environments, as far as it may change a kernel: ``torch 2.15.0 -> 2.15.1``."""
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
