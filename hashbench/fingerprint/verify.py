"""What became of recorded kernels on this machine: checked in a fresh process, and under one setting at a time. Imports
no torch."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.fingerprint.distance import Distance
from hashbench.fingerprint.document import Fingerprints, Kernel, ModelFingerprint
from hashbench.io import from_json, to_json
from hashbench.processes import describe_end, python_calling, run

SAME, CHANGED, NOT_RUN = "same", "changed", "not run"
"""What became of one kernel."""

TARGET = "hashbench.fingerprint.checking:main"
SECONDS = 3600.0
_CRASHES = 20
"""Kernels that may end the process before no further one is tried."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of kernel ``number`` of a file: :data:`SAME`, :data:`CHANGED` or :data:`NOT_RUN`.

    ``note`` is the reason why it was not run, or how the form of its outputs changed; ``library`` computes it now.
    """

    number: int
    status: str
    note: str = ""
    library: str = ""
    distance: Distance = field(default=Distance())


@dataclass(frozen=True, slots=True)
class Request:
    """What a fresh process is to check: the file at ``path``, of it the models that are called ``only`` (none: all),
    but the kernels ``skip``, with ``threads``, torch's ``settings`` by name, and the ops of ``imports`` defined."""

    path: str
    only: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    threads: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[int, ...] = ()

    def chosen(self, fingerprints: Fingerprints) -> Fingerprints:
        """The models that are asked for.

        Raises:
            HashbenchError: the file does not have one of them.
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
class Change:
    """A kernel that changed, with the models that call it, and what became of it."""

    kernel: Kernel
    models: tuple[str, ...]
    checked: Checked


@dataclass(frozen=True, slots=True)
class Verification:
    """What became of all kernels of some models: how many there are and are the ``same``, those that ``changed``, those
    not run by their reason, and what was left out of the file when it was recorded (calls by reason)."""

    models: tuple[ModelFingerprint, ...]
    kernels: int
    same: int
    changed: tuple[Change, ...]
    not_run: Mapping[str, tuple[Kernel, ...]]
    left_out: Mapping[str, int]


def verify(
    fingerprints: Fingerprints,
    request: Request,
    *,
    variables: Mapping[str, str | None] | None = None,
    on_progress: Callable[[str], object] = lambda _: None,
) -> Verification:
    """Check the kernels that ``request`` asks for in fresh processes; where a kernel ends its process, the others go on
    in another one, without it and those of other models that are equal.

    Args:
        fingerprints: the content of the file that the request names.
        request: what to check.
        variables: environment variables of the process; one of ``None`` is taken away.
        on_progress: told what becomes of processes, a sentence each.

    Raises:
        HashbenchError: a model is not in the file, or no process could be started.
    """
    chosen = request.chosen(fingerprints)
    runs = [model.run_of(kernel) for model in chosen.models for kernel in model.kernels]
    results: dict[int, Checked] = {}
    crashes = 0
    while True:
        asked = replace(request, skip=tuple(results))
        answered, begun, problem = _in_child(asked, variables or {})
        results |= {checked.number: checked for checked in answered}
        if problem and begun is not None:
            ended, crashes = Checked(begun, NOT_RUN, f"ends its process: {problem}"), crashes + 1
            results |= {number: replace(ended, number=number) for number, run in enumerate(runs) if run == runs[begun]}
            on_progress(ended.note)
        elif problem:
            raise HashbenchError("cannot check the fingerprints", consequence=f"a fresh process failed ({problem})")
        if not problem or crashes > _CRASHES:
            return summary(chosen, list(results.values()))


def _in_child(request: Request, variables: Mapping[str, str | None]) -> tuple[list[Checked], int | None, str]:
    """What one fresh process found, the kernel that it was at when it ended too early, and how that was."""
    away = [name for name, value in variables.items() if value is None]
    given = {name: value for name, value in variables.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        answers = Path(folder, "answers")
        command = python_calling(TARGET, json.dumps(to_json(request)), str(answers), dies_with_us=True)
        unset = [word for name in away for word in ("-u", name)]
        done = run(["env", *unset, *command] if unset else command, seconds=SECONDS, environment=given)
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
    """What became of all kernels; equal ones of several models are one."""
    by_number = {checked.number: checked for checked in results}
    numbered = enumerate((model, kernel) for model in fingerprints.models for kernel in model.kernels)
    changed: dict[str, Change] = {}
    not_run: defaultdict[str, dict[str, Kernel]] = defaultdict(dict)
    same: set[str] = set()
    for number, (model, kernel) in numbered:
        checked = by_number.get(number, Checked(number, NOT_RUN, "too many kernels ended their process"))
        key = f"{kernel.signature()} {kernel.outputs}"
        if checked.status == SAME:
            same.add(key)
        elif checked.status == NOT_RUN:
            not_run[checked.note][key] = kernel
        elif key in changed:
            models = tuple(dict.fromkeys([*changed[key].models, model.name]))
            changed[key] = replace(changed[key], models=models)
        else:
            changed[key] = Change(kernel, (model.name,), checked)
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
