"""Each experiment changes what it names and restores it; altered calls keep what must stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.catalog import EXPERIMENTS
from hashbench.core.diagnose import replay as replay_module
from hashbench.core.diagnose.calls.call import TensorForm
from hashbench.core.diagnose.calls.live import LiveCall, captured_environment
from hashbench.core.diagnose.replay import methods
from hashbench.core.diagnose.replay.methods import with_copied_sources, with_exact_values
from hashbench.core.diagnose.replay.replayer import UNCHANGED, InapplicableError
from hashbench.core.run.settings import preserved, settings
from tests.core.diagnose.replay.replay_helpers import DETERMINISTIC, aten, captured, numbers, overlapping, tried

pytestmark = pytest.mark.usefixtures("eight_threads")


CHANGES = {name: method for name, method in methods.METHODS.items() if isinstance(method, methods.ReplayChange)}
AROUND = {name: change for name, change in CHANGES.items() if change.around is not UNCHANGED}


SDP = ("math", "flash", "mem_efficient", "cudnn")


CHANGES = {
    "one_thread": {"num_threads": "1"},
    "deterministic": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "False"},
    "deterministic_fill": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "True"},
    "nondeterministic": {"deterministic_algorithms": "off", "fill_uninitialized_memory": "False"},
    "onednn_off": {"mkldnn.enabled": "False"},
    "cudnn_off": {"cudnn.enabled": "False"},
    "cudnn_benchmark": {"cudnn.benchmark": "True"},
    "cudnn_deterministic": {"cudnn.deterministic": "True"},
    "onednn_deterministic": {"mkldnn.deterministic": "True"},
    "sdpa_math": {f"sdp.{name}": str(name == "math") for name in SDP},
    "sdpa_flash": {f"sdp.{name}": str(name == "flash") for name in SDP},
    "sdpa_efficient": {f"sdp.{name}": str(name == "mem_efficient") for name in SDP},
    "sdpa_cudnn": {f"sdp.{name}": str(name == "cudnn") for name in SDP},
}


@pytest.mark.parametrize("name", AROUND)
def test_context_is_changed_and_restored(name: str) -> None:
    before = settings()
    with suppress(ZeroDivisionError), AROUND[name].around():
        assert CHANGES.get(name, {}).items() <= settings().items()
        raise ZeroDivisionError
    assert settings() == before


def set_older_names(*, on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def set_newer_names(precision: str) -> None:
    for owner in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        owner.fp32_precision = precision


TF32_BEFORE: dict[str, Callable[[], None]] = {
    "as a new process has it": lambda: None,
    "older names, off": lambda: set_older_names(on=False),
    "older names, on": lambda: set_older_names(on=True),
    "newer names, off": lambda: set_newer_names("ieee"),
    "newer names, on": lambda: set_newer_names("tf32"),
    "the name for everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "a precision of matmuls": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("before", TF32_BEFORE)
def test_tf32_names_stay_consistent(before: str, on: bool) -> None:
    """torch raises on reading the older names where they and the newer ones differ; its kernels read either."""
    with preserved():
        TF32_BEFORE[before]()
        known = settings()
        with AROUND["tf32_on" if on else "tf32_off"].around():
            assert torch.backends.cuda.matmul.allow_tf32 is on
            assert torch.backends.cudnn.allow_tf32 is on
            owners = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
            assert {owner.fp32_precision for owner in owners} == {"tf32" if on else "ieee"}
        assert settings() == known


@pytest.mark.parametrize(
    ("device", "special"),
    [
        ("cpu", {"one_thread", "onednn_off"}),
        (
            "cuda:1",
            {"cudnn_off", "cudnn_benchmark", "cudnn_deterministic", "tf32_off", "tf32_on", "busy_stream"}
            | {"sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"},
        ),
        ("xpu", {"onednn_deterministic", "sdpa_math", "sdpa_flash", "busy_stream"}),
        ("mps", set()),
    ],
)
def test_experiments_match_the_device(device: str, special: set[str]) -> None:
    everywhere = {"deterministic", "deterministic_fill", "nondeterministic", "entropy", "clocks", "one_worker", "busy"}
    found = {name for name in (*AROUND, "busy_stream") if EXPERIMENTS[name].runs_on(torch.device(device).type)}
    assert found == everywhere | special


@pytest.mark.parametrize(
    ("func", "chooses"),
    [
        (aten.scaled_dot_product_attention.default, True),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, False),
        (aten.mm.default, False),
    ],
    ids=str,
)
def test_attention_backends_need_a_composite_op(func: Any, chooses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = replace(EXPERIMENTS["sdpa_math"], devices=())
    monkeypatch.setattr(replay_module, "EXPERIMENTS", {**EXPERIMENTS, "sdpa_math": everywhere})
    heads = [numbers(1, 2, 4, 8)] * 3
    arm = tried(captured(func, *(heads if "dot" in str(func) else [numbers(4, 4)] * 2)), "sdpa_math").arm("sdpa_math")
    assert arm.ran is chooses, arm
    assert chooses or arm.note.startswith("this kernel calls no other op")


def test_exact_values_keep_indices_and_aliasing() -> None:
    base = numbers(40)
    call = captured(aten.index_put_.default, base[:20], [torch.tensor([3, 4])], base[20:22])
    changed = with_exact_values(call)
    with captured_environment(call):
        old, new = LiveCall(call).tensors, LiveCall(changed).tensors
    assert new[0].tolist() == new[0].round().clamp(-8, 8).tolist() != old[0].tolist()
    assert torch.equal(old[1], new[1])
    assert new[0].untyped_storage()._cdata == new[2].untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_exact_values_of_small_dtypes_are_ones(dtype: torch.dtype) -> None:
    changed = with_exact_values(captured(aten.clone.default, numbers(100).to(dtype)))
    with captured_environment(changed):
        assert set(LiveCall(changed).tensors[0].float().tolist()) == {-1.0, 0.0, 1.0}


def test_only_aliasing_sources_are_copied() -> None:
    changed = with_copied_sources(overlapping())
    assert [form.storage for form in changed.tensors if isinstance(form, TensorForm)] == [0, 1]
    with pytest.raises(InapplicableError, match="nothing that is written shares memory"):
        with_copied_sources(DETERMINISTIC["a product"]())
