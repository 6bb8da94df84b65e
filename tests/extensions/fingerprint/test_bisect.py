"""Candidate settings, trials under one setting at a time, and the conclusion from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hashbench.extensions.fingerprint import bisect
from hashbench.extensions.fingerprint.bisect import Setting, Trial, bisection_text, candidates
from hashbench.extensions.fingerprint.document import Fingerprints, Kernel
from hashbench.extensions.fingerprint.verify import CHANGED, ChangedKernel, Checked


def of(library: str, *, now: str = "") -> ChangedKernel:
    kernel = Kernel("aten.mm.default", (), {}, (), "forward", 1, library, (), ())
    return ChangedKernel(kernel, ("net",), Checked(0, CHANGED, library=now))


def environment(*, threads: int = 2, capability: str = "AVX512", **variables: str) -> dict[str, Any]:
    facts = {"threads": {"intra_op": threads}, "torch": {"cpu_capability": capability}}
    return {**facts, "variables": variables}


def tried(
    recorded: Mapping[str, Any], here: Mapping[str, Any], *changed: ChangedKernel, device: str = "cpu"
) -> list[str]:
    return [setting.text for setting in candidates(recorded, here, changed, device=device)]


def test_recorded_settings_are_tried_first() -> None:
    recorded = environment(threads=2, MKL_CBWR="AVX2")
    here = environment(threads=1, ONEDNN_MAX_CPU_ISA="AVX2")

    assert tried(recorded, here, of("oneDNN jit:avx512_core")) == [
        "threads 2 instead of 1, as recorded",
        "ONEDNN_MAX_CPU_ISA unset instead of AVX2, as recorded",
        "MKL_CBWR AVX2 instead of unset, as recorded",
        "oneDNN mkldnn.enabled=False instead of its default",
    ]


def test_only_changed_libraries_are_tried() -> None:
    same = environment()

    assert tried(same, same, of("MKL SGEMM")) == [
        f"MKL_CBWR {value} instead of unset" for value in ("COMPATIBLE", "AVX2", "AVX512")
    ]
    assert [line.split()[0] for line in tried(same, same, of("ATen native", now="MKL SGEMM"))] == [
        *["ATEN_CPU_CAPABILITY"] * 2,
        *["MKL_CBWR"] * 3,
    ]


@pytest.mark.parametrize(("capability", "values"), [("AVX2", ["default"]), ("DEFAULT", []), ("SVE", ["default"])])
def test_unsupported_capability_is_not_tried(capability: str, values: list[str]) -> None:
    same = environment(capability=capability)

    assert tried(same, same, of("ATen native")) == [f"ATEN_CPU_CAPABILITY {one} instead of unset" for one in values]


def test_forged_value_is_never_exported() -> None:
    recorded = environment(MKL_CBWR="$(rm -rf /)", LD_PRELOAD="evil.so")

    settings = list(candidates(recorded, environment(), [of("MKL SGEMM")], device="cpu"))

    assert {value for setting in settings for value in setting.variables.values()} == {"COMPATIBLE", "AVX2", "AVX512"}


def test_on_accelerators_their_settings_are_tried() -> None:
    same = environment()

    names = [line.split()[0] for line in tried(same, same, of("unknown"), device="cuda")]
    assert names == ["cuDNN", "cuDNN's", "TF32", "attention", "attention", "attention"]


@pytest.mark.parametrize(
    ("trials", "end"),
    [
        ([], "No setting is known that could be tried."),
        ([(0, 0)], "None of these settings explains it: most likely the kernels themselves are others"),
        ([(3, 0), (5, 4)], "No setting explains all of it; most does A 2 instead of 1."),
        ([(0, 0), (5, 0)], "A explains it: with A 2 instead of 1, all give what was recorded."),
    ],
)
def test_bisection_text_conclusion(trials: list[tuple[int, int]], end: str) -> None:
    setting = Setting("A", "1", "2")

    said = bisection_text([Trial(setting, back, 5, others) for back, others in trials])

    assert said.splitlines()[-1].startswith(end)


def test_bisect_stops_when_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    change = of("MKL SGEMM")
    empty = Fingerprints({}, ())

    def verify(_: object, request: bisect.VerifyRequest, **__: object) -> bisect.Verification:
        asked.append(request.threads)
        return bisect.Verification((), 1, 0, () if request.threads == 2 else (change,), {}, {})

    monkeypatch.setattr(bisect, "verify", verify)
    settings = [Setting("threads", "1", str(number), threads=number) for number in (3, 2, 4)]
    before = bisect.Verification((), 1, 0, (change,), {}, {})
    trials = bisect.bisect(empty, bisect.VerifyRequest("base.json"), before, settings)

    assert asked == [3, 2]
    assert [trial.explains for trial in trials] == [False, True]
