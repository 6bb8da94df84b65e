"""Find the setting that explains changed kernels: check all of them again under one setting at a time, each in a fresh
process. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.fingerprint.verify import ChangedKernel, Verification, VerifyRequest, verify

_CAPABILITIES = ("default", "avx2", "avx512")
"""Values of ``ATEN_CPU_CAPABILITY``; a processor that has one also has those before it."""

_LIMITS = {
    "ATEN_CPU_CAPABILITY": ("ATen native", _CAPABILITIES),
    "ONEDNN_MAX_CPU_ISA": ("oneDNN", ("SSE41", "AVX2", "AVX512_CORE", "ALL")),
    "MKL_CBWR": ("MKL", ("COMPATIBLE", "AVX2", "AVX512")),
}
"""Environment variables that select kernels of a library: the library's name, and values."""

_ON_THE_CPU = {"oneDNN": {"mkldnn.enabled": "False"}}
_ON_ACCELERATORS = {
    "cuDNN": {"cudnn.enabled": "False"},
    "cuDNN's choice by measuring": {"cudnn.benchmark": "True"},
    "TF32": {"cuda.matmul.allow_tf32": "True", "cudnn.allow_tf32": "True"},
    "attention by flash": {"sdp.flash": "False"},
    "attention by efficient memory": {"sdp.mem_efficient": "False"},
    "attention by cuDNN": {"sdp.cudnn": "False"},
}
"""torch settings by topic, with non-default values."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting with a changed value.

    Attributes:
        name: of the setting.
        here: its current value.
        value: the value to try.
        recorded: ``value`` is that of the recording.
        threads: thread count to try.
        variables: environment variables to try; ``None`` unsets one.
        settings: torch settings to try.
    """

    name: str
    here: str
    value: str
    recorded: bool = False
    threads: int | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Description: ``threads 2 instead of 1, as recorded``."""
        return f"{self.name} {self.value} instead of {self.here}{', as recorded' if self.recorded else ''}"


@dataclass(frozen=True, slots=True)
class Trial:
    """Effect of one setting.

    Attributes:
        setting: what was tried.
        back: number of changed kernels that give the recorded result again.
        changed: number of changed kernels.
        others: number of unchanged kernels that now differ.
    """

    setting: Setting
    back: int
    changed: int
    others: int

    @property
    def explains(self) -> bool:
        """Whether all kernels give the recorded results under it."""
        return self.back == self.changed and not self.others


def candidates(
    recorded: Mapping[str, Any], here: Mapping[str, Any], changed: Sequence[ChangedKernel], *, device: str
) -> Iterator[Setting]:
    """Yield the settings to try; those known to have changed since the recording come first.

    Args:
        recorded: environment of the recording.
        here: current environment.
        changed: changed kernels; settings of a library are tried only if it computed, or computes, one of them.
        device: device of the kernels.
    """
    settings = [*_threads(recorded, here), *_variables(recorded, here, changed), *_of_torch(changed, device)]
    yield from sorted(settings, key=lambda setting: not setting.recorded)


def _threads(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Setting]:
    old, new = (_mapping_at(environment, "threads").get("intra_op") for environment in (recorded, here))
    if type(old) is int and old > 0 and old != new:
        yield Setting("threads", str(new), str(old), recorded=True, threads=old)


def _variables(
    recorded: Mapping[str, Any], here: Mapping[str, Any], changed: Sequence[ChangedKernel]
) -> Iterator[Setting]:
    capability = str(_mapping_at(here, "torch").get("cpu_capability", "")).lower()
    for name, (library, values) in _LIMITS.items():
        old, new = (_mapping_at(environment, "variables").get(name) for environment in (recorded, here))
        if old != new and (old is None or old in values):
            yield Setting(name, new or "unset", old or "unset", recorded=True, variables={name: old})
            continue
        if not _involves(library, changed):
            continue
        if name == "ATEN_CPU_CAPABILITY":  # a processor that does not have what is asked for ends the process
            known = capability in _CAPABILITIES
            values = _CAPABILITIES[: _CAPABILITIES.index(capability)] if known else _CAPABILITIES[:1]
        for value in values:
            if value != new:
                yield Setting(name, new or "unset", value, variables={name: value})


def _of_torch(changed: Sequence[ChangedKernel], device: str) -> Iterator[Setting]:
    for name, values in (_ON_THE_CPU if device == "cpu" else _ON_ACCELERATORS).items():
        if device != "cpu" or _involves(name, changed):
            shown = ", ".join(f"{key}={value}" for key, value in values.items())
            yield Setting(name, "its default", shown, settings=values)


def _involves(library: str, changed: Sequence[ChangedKernel]) -> bool:
    return any(library in f"{change.kernel.library} {change.checked.library}" for change in changed)


def _mapping_at(environment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = environment.get(name)
    return value if isinstance(value, dict) else {}


def bisect(
    fingerprints: Fingerprints,
    request: VerifyRequest,
    before: Verification,
    settings: Sequence[Setting],
    *,
    on_progress: Callable[[str], object] = lambda _: None,
) -> tuple[Trial, ...]:
    """Check the same kernels under each setting alone until one explains all; return the trials in order.

    Args:
        fingerprints: content of the file that the request names.
        request: what was checked.
        before: its result.
        settings: settings to try.
        on_progress: called with each setting before it is tried.
    """
    trials: list[Trial] = []
    names = {change.kernel.outcome() for change in before.changed}
    for setting in settings:
        on_progress(setting.text)
        asked = replace(request, threads=setting.threads or request.threads, settings=setting.settings)
        after = {change.kernel.outcome() for change in verify(fingerprints, asked, variables=setting.variables).changed}
        trials.append(Trial(setting, len(names - after), len(names), len(after - names)))
        if trials[-1].explains:
            break
    return tuple(trials)


def bisection_text(trials: Sequence[Trial]) -> str:
    """Format the trials, one per line, with a conclusion."""
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
