"""Which setting explains that kernels changed: all are checked again under one setting at a time, each in a fresh
process. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hashbench.fingerprint.document import Fingerprints
from hashbench.fingerprint.verify import Change, Request, Verification, verify

_CAPABILITIES = ("default", "avx2", "avx512")
"""Values of ``ATEN_CPU_CAPABILITY``, each of which a processor that has the next one has, too."""

_LIMITS = {
    "ATEN_CPU_CAPABILITY": ("ATen native", _CAPABILITIES),
    "ONEDNN_MAX_CPU_ISA": ("oneDNN", ("SSE41", "AVX2", "AVX512_CORE", "ALL")),
    "MKL_CBWR": ("MKL", ("COMPATIBLE", "AVX2", "AVX512")),
}
"""Environment variables that choose among the kernels of a library: its name, and values."""

_ON_THE_CPU = {"oneDNN": {"mkldnn.enabled": "False"}}
_ON_ACCELERATORS = {
    "cuDNN": {"cudnn.enabled": "False"},
    "cuDNN's choice by measuring": {"cudnn.benchmark": "True"},
    "TF32": {"cuda.matmul.allow_tf32": "True", "cudnn.allow_tf32": "True"},
    "attention by flash": {"sdp.flash": "False"},
    "attention by efficient memory": {"sdp.mem_efficient": "False"},
    "attention by cuDNN": {"sdp.cudnn": "False"},
}
"""Settings of torch by what they are about: other values than those in force when kernels are run."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting at another value than here: ``value`` is that of the recording where ``recorded``."""

    name: str
    here: str
    value: str
    recorded: bool = False
    threads: int | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """``threads 2 instead of 1, as recorded``."""
        return f"{self.name} {self.value} instead of {self.here}{', as recorded' if self.recorded else ''}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting does: of the kernels that changed, ``back`` are as recorded under it, and ``others`` that were the
    same are not."""

    setting: Setting
    back: int
    changed: int
    others: int

    @property
    def explains(self) -> bool:
        """Whether everything is as recorded under it."""
        return self.back == self.changed and not self.others


def candidates(
    recorded: Mapping[str, Any], here: Mapping[str, Any], changed: Sequence[Change], *, device: str
) -> Iterator[Setting]:
    """The settings to try, those first that are known to be another than when recorded.

    Args:
        recorded: the environment of the recording.
        here: the environment now.
        changed: kernels; what chooses among those of a library is tried where it computed, or computes, one of them.
        device: that the kernels run on.
    """
    settings = [*_threads(recorded, here), *_variables(recorded, here, changed), *_of_torch(changed, device)]
    yield from sorted(settings, key=lambda setting: not setting.recorded)


def _threads(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Setting]:
    old, new = (_part(environment, "threads").get("intra_op") for environment in (recorded, here))
    if type(old) is int and old > 0 and old != new:
        yield Setting("threads", str(new), str(old), recorded=True, threads=old)


def _variables(recorded: Mapping[str, Any], here: Mapping[str, Any], changed: Sequence[Change]) -> Iterator[Setting]:
    capability = str(_part(here, "torch").get("cpu_capability", "")).lower()
    for name, (library, values) in _LIMITS.items():
        old, new = (_part(environment, "variables").get(name) for environment in (recorded, here))
        if old != new and (old is None or old in values):
            yield Setting(name, new or "unset", old or "unset", recorded=True, variables={name: old})
            continue
        if not _is_about(library, changed):
            continue
        if name == "ATEN_CPU_CAPABILITY":  # a processor that does not have what is asked for ends the process
            known = capability in _CAPABILITIES
            values = _CAPABILITIES[: _CAPABILITIES.index(capability)] if known else _CAPABILITIES[:1]
        for value in values:
            if value != new:
                yield Setting(name, new or "unset", value, variables={name: value})


def _of_torch(changed: Sequence[Change], device: str) -> Iterator[Setting]:
    for name, values in (_ON_THE_CPU if device == "cpu" else _ON_ACCELERATORS).items():
        if device != "cpu" or _is_about(name, changed):
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            yield Setting(name, "its default", shown, settings=values)


def _is_about(library: str, changed: Sequence[Change]) -> bool:
    return any(library in f"{change.kernel.library} {change.checked.library}" for change in changed)


def _part(environment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = environment.get(name)
    return value if isinstance(value, dict) else {}


def bisect(
    fingerprints: Fingerprints,
    request: Request,
    before: Verification,
    settings: Sequence[Setting],
    *,
    on_progress: Callable[[str], object] = lambda _: None,
) -> tuple[Trial, ...]:
    """Check the same kernels under each setting alone, until one explains all: the trials in their order.

    Args:
        fingerprints: the content of the file that the request names.
        request: what was checked.
        before: what came out.
        settings: what to try.
        on_progress: told of each setting before it is tried.
    """
    trials: list[Trial] = []
    names = {_name(change) for change in before.changed}
    for setting in settings:
        on_progress(setting.text)
        asked = replace(request, threads=setting.threads or request.threads, settings=setting.settings)
        after = {_name(change) for change in verify(fingerprints, asked, variables=setting.variables).changed}
        trials.append(Trial(setting, len(names - after), len(names), len(after - names)))
        if trials[-1].explains:
            break
    return tuple(trials)


def _name(change: Change) -> str:
    return f"{change.kernel.signature()} {change.kernel.outputs}"


def bisected_text(trials: Sequence[Trial]) -> str:
    """What the trials say, a line each and a conclusion."""
    if not trials:
        return "No setting is known that could be tried."
    lines = []
    for trial in trials:
        others = f", {trial.others} others change" if trial.others else ""
        lines.append(f"  {trial.setting.text}: {trial.back} of {trial.changed} as recorded again{others}")
    explaining = next((trial for trial in trials if trial.explains), None)
    best = max(trials, key=lambda trial: (trial.back, -trial.others))
    if explaining is not None:
        end = f"{explaining.setting.name} explains it: with {explaining.setting.text}, all give what was recorded."
    elif best.back:
        end = f"No setting explains all of it; most does {best.setting.text}."
    else:
        end = "None of these settings explains it: most likely the kernels themselves are others, or the processor is."
    return "\n".join(["Under one setting at a time:", *lines, end])
