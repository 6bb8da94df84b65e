"""Check recorded kernels on this machine in fresh processes. Imports no torch."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hashbench.core.errors import HashbenchError
from hashbench.core.io import from_json, to_json
from hashbench.core.processes import describe_end, python_calling, run
from hashbench.extensions.fingerprint.distance import Distance
from hashbench.extensions.fingerprint.document import Fingerprints, Kernel, ModelFingerprint

SAME, CHANGED, NOT_RUN = "same", "changed", "not run"
"""What became of one kernel."""

TARGET = "hashbench.extensions.fingerprint.checking:main"
SECONDS = 3600.0
_CRASHES = 20
"""Number of kernels that may kill their process before checking stops."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Result for one kernel.

    Attributes:
        number: position of the kernel in the file.
        status: :data:`SAME`, :data:`CHANGED` or :data:`NOT_RUN`.
        note: why it was not run, or how dtype, shape or stride of its outputs changed.
        library: library that computes it now.
        distance: of the sampled elements.
    """

    number: int
    status: str
    note: str = ""
    library: str = ""
    distance: Distance = field(default=Distance())


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What a fresh process checks.

    Attributes:
        path: file of the fingerprints.
        only: names of models; empty: all.
        imports: modules or files that define ops.
        threads: torch threads.
        skip: numbers of kernels to skip.
    """

    path: str
    only: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    threads: int | None = None
    skip: tuple[int, ...] = ()

    def chosen(self, fingerprints: Fingerprints) -> Fingerprints:
        """Return the requested models.

        Raises:
            HashbenchError: the file lacks one of them.
        """
        if not self.only:
            return fingerprints
        names = {model.name for model in fingerprints.models}
        missing = [name for name in self.only if name not in names]
        if missing:
            raise HashbenchError(
                f"{self.path} holds no fingerprint of {missing[0]}",
                consequence="nothing was run",
                tip=f"It holds {', '.join(sorted(names)[:6])}{' and others' if len(names) > 6 else ''}.",
            )
        return replace(fingerprints, models=tuple(model for model in fingerprints.models if model.name in self.only))


@dataclass(frozen=True, slots=True)
class ChangedKernel:
    """A changed kernel, the models that call it, and its result."""

    kernel: Kernel
    models: tuple[str, ...]
    checked: Checked


@dataclass(frozen=True, slots=True)
class Verification:
    """Result for all kernels of some models.

    Attributes:
        models: the checked models.
        kernels: number of distinct kernels.
        same: number of unchanged kernels.
        changed: the changed ones.
        not_run: kernels that were not run, by reason.
        left_out: calls left out of the recording, by reason.
    """

    models: tuple[ModelFingerprint, ...]
    kernels: int
    same: int
    changed: tuple[ChangedKernel, ...]
    not_run: Mapping[str, tuple[Kernel, ...]]
    left_out: Mapping[str, int]


def verify(
    fingerprints: Fingerprints,
    request: VerifyRequest,
    *,
    on_progress: Callable[[str], object] = lambda _: None,
) -> Verification:
    """Check the requested kernels in fresh processes.

    If a kernel kills its process, the others continue in a new one, without it and its duplicates in other models.

    Args:
        fingerprints: content of the file that the request names.
        request: what to check.
        on_progress: called with a sentence for each event.

    Raises:
        HashbenchError: a model is not in the file, or no process could be started.
    """
    chosen = request.chosen(fingerprints)
    runs = [model.run_of(kernel) for model in chosen.models for kernel in model.kernels]
    results: dict[int, Checked] = {}
    crashes = 0
    while True:
        asked = replace(request, skip=tuple(results))
        answered, begun, problem = _in_child(asked)
        results |= {checked.number: checked for checked in answered}
        if problem and begun is not None:
            ended, crashes = Checked(begun, NOT_RUN, f"ends its process: {problem}"), crashes + 1
            results |= {number: replace(ended, number=number) for number, run in enumerate(runs) if run == runs[begun]}
            on_progress(ended.note)
        elif problem:
            raise HashbenchError("cannot check the fingerprints", consequence=f"a fresh process failed ({problem})")
        if not problem or crashes > _CRASHES:
            return summary(chosen, list(results.values()))


def _in_child(request: VerifyRequest) -> tuple[list[Checked], int | None, str]:
    """Run one fresh process; return its results, the kernel during which it died, and how it died."""
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        answers = Path(folder, "answers")
        command = python_calling(TARGET, json.dumps(to_json(request)), str(answers), dies_with_us=True)
        done = run(command, seconds=SECONDS)
        lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
    content = [json.loads(line) for line in lines if line.endswith(("}", '"')) or line.isdecimal()]
    checked = [from_json(Checked, line) for line in content if isinstance(line, dict)]
    if content and content[-1] == "done":
        return checked, None, ""
    begun = content[-1] if content and isinstance(content[-1], int) else None
    if done.status is None:
        return checked, begun, f"no end after {SECONDS:g} s"
    return checked, begun, describe_end(done.status) if done.status < 0 else done.last_line


def summary(fingerprints: Fingerprints, results: Sequence[Checked]) -> Verification:
    """Combine the results of all kernels; equal kernels of several models are merged."""
    by_number = {checked.number: checked for checked in results}
    numbered = enumerate((model, kernel) for model in fingerprints.models for kernel in model.kernels)
    changed: dict[str, ChangedKernel] = {}
    not_run: defaultdict[str, dict[str, Kernel]] = defaultdict(dict)
    same: set[str] = set()
    for number, (model, kernel) in numbered:
        checked = by_number.get(number, Checked(number, NOT_RUN, "too many kernels ended their process"))
        key = kernel.outcome()
        if checked.status == SAME:
            same.add(key)
        elif checked.status == NOT_RUN:
            not_run[checked.note][key] = kernel
        elif key in changed:
            models = tuple(dict.fromkeys([*changed[key].models, model.name]))
            changed[key] = replace(changed[key], models=models)
        else:
            changed[key] = ChangedKernel(kernel, (model.name,), checked)
    left_out: defaultdict[str, int] = defaultdict(int)
    for model in fingerprints.models:
        for reason, calls in model.left_out.items():
            left_out[reason] += sum(calls.values())
    others = {reason: tuple(kernels.values()) for reason, kernels in not_run.items()}
    return Verification(
        fingerprints.models,
        kernels=len(same) + len(changed) + sum(map(len, others.values())),
        same=len(same),
        changed=tuple(changed.values()),
        not_run=others,
        left_out=left_out,
    )
