"""Settings are in force inside a context and restored after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.records import RunOptions
from hashbench.core.run.settings import applied, deterministic_settings, lower_precisions, preserved, settings


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails when a global setting, or what is installed around calls, is another afterwards."""
    before, modes = settings(), torch.overrides._get_current_function_mode_stack()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    assert settings() == before
    assert torch.overrides._get_current_function_mode_stack() == modes
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace


@pytest.mark.parametrize(("asked", "mode"), [("on", 2), ("warn", 1), ("off", 0)])
def test_settings_apply_inside_only(asked: str, mode: int) -> None:
    with nothing_left(), deterministic_settings(asked, threads=1):
        assert torch.get_deterministic_debug_mode() == mode
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.mkldnn.deterministic
        assert torch.get_num_threads() == 1
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def _set(owner: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


CHANGES = {
    "deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill_uninitialized_memory": _set(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
    "flush_denormal": lambda: torch.set_flush_denormal(True),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "grad_enabled": lambda: torch._C._set_grad_enabled(False),
    "autocast_cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "autocast_cpu_dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "cudnn.enabled": _set(torch.backends.cudnn, "enabled", False),
    "cudnn.deterministic": _set(torch.backends.cudnn, "deterministic", True),
    "cudnn.benchmark": _set(torch.backends.cudnn, "benchmark", True),
    "cudnn.allow_tf32": _set(torch.backends.cudnn, "allow_tf32", False),
    "cuda.matmul.allow_tf32": _set(torch.backends.cuda.matmul, "allow_tf32", True),
    "cuda.matmul.fp16_reduction": _set(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "mkldnn.deterministic": _set(torch.backends.mkldnn, "deterministic", True),
    "mkldnn.enabled": _set(torch.backends.mkldnn, "enabled", False),
    "sdp.flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "sdp.math": lambda: torch.backends.cuda.enable_math_sdp(False),
    "sdp.mem_efficient": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "opt_einsum.strategy": _set(torch.backends.opt_einsum, "strategy", "greedy"),
    "CUBLAS_WORKSPACE_CONFIG": lambda: os.environ.__setitem__("CUBLAS_WORKSPACE_CONFIG", ":16:8"),
}
if not torch.backends.opt_einsum.is_available():
    del CHANGES["opt_einsum.strategy"]


@pytest.mark.parametrize("name", CHANGES)
def test_changed_setting_is_restored_and_reapplied(name: str) -> None:
    with nothing_left():
        before = settings()
        with preserved():
            CHANGES[name]()
            noted = settings()
            assert noted.get(name) != before.get(name)
            with deterministic_settings("off"):
                pass
        with applied(noted):
            assert settings() == noted


def test_all_settings_are_restored_and_reapplied() -> None:
    with nothing_left(), suppress(ZeroDivisionError), deterministic_settings("on"):
        for change in CHANGES.values():
            change()
        noted = settings()
        raise ZeroDivisionError
    with nothing_left(), suppress(ZeroDivisionError), applied(noted):
        assert settings() == noted
        raise ZeroDivisionError


def test_unknown_settings_are_skipped() -> None:
    with nothing_left():
        before = settings()
        with applied({"of.another.torch": "True", "inference_mode": "True", "cudnn.benchmark": "True"}):
            assert settings() == before | {"cudnn.benchmark": "True"}


def test_failing_restore_does_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "set_default_dtype", _refuse)
    with preserved():
        torch._C._set_default_dtype(torch.float64)
        torch.set_num_threads(threads + 1)
        torch.backends.cudnn.benchmark = True
    torch._C._set_default_dtype(torch.float32)
    assert (torch.get_num_threads(), torch.backends.cudnn.benchmark) == (threads, False)


def _refuse(_value: object) -> None:
    raise RuntimeError("not now")


def test_mixed_precision_names_are_restored() -> None:
    names = [(torch.backends, "fp32_precision"), (torch.backends.cuda.matmul, "fp32_precision")]
    if not all(hasattr(owner, name) for owner, name in names):
        pytest.skip("this torch has only the older names")
    before = [getattr(owner, name) for owner, name in names]
    try:
        with nothing_left(), deterministic_settings("on"):
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.set_default_dtype(torch.float64)
            torch.backends.cudnn.benchmark = True
        assert [getattr(owner, name) for owner, name in names] == before
    finally:
        for (owner, name), value in zip(names, before, strict=True):
            setattr(owner, name, value)


def _inner(backend: str, op: str, value: str) -> Callable[[], None]:
    return lambda: torch._C._set_fp32_precision_setter(backend, op, value)


LESS_PRECISE = {
    "a new process": lambda: None,
    "all by the newer name": _inner("generic", "all", "tf32"),
    "CUDA by the newer name": _inner("cuda", "all", "tf32"),
    "matmul by the newer name": _inner("cuda", "matmul", "tf32"),
    "one of cuDNN's by the newer name": _inner("cuda", "rnn", "ieee"),
    "oneDNN by the newer name": _inner("mkldnn", "all", "bf16"),
    "oneDNN's matmul by the newer name": _inner("mkldnn", "matmul", "tf32"),
    "matmul by the older name": _set(torch.backends.cuda.matmul, "allow_tf32", True),
    "cuDNN by the older name": _set(torch.backends.cudnn, "allow_tf32", True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older and newer names mixed": lambda: (
        torch.set_float32_matmul_precision("high"),
        _inner("cuda", "matmul", "ieee")(),
        _inner("generic", "all", "bf16")(),
    ),
}


OLDER = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, "highest"),
    "cuda.matmul.allow_tf32": (lambda: torch.backends.cuda.matmul.allow_tf32, False),
    "cudnn.allow_tf32": (lambda: torch.backends.cudnn.allow_tf32, False),
}


NEWER = [("cuda", op) for op in ("matmul", "conv", "rnn")] + [("mkldnn", op) for op in ("matmul", "conv", "rnn")]


@pytest.mark.parametrize("name", LESS_PRECISE)
def test_precisions_are_full_and_restored(name: str) -> None:
    with nothing_left(), preserved():
        LESS_PRECISE[name]()
        before = inherited()
        with nothing_left(), deterministic_settings("on"):
            assert {name: read() for name, (read, _) in OLDER.items()} == {
                name: off for name, (_, off) in OLDER.items()
            }
            assert not {torch._C._get_fp32_precision_getter(*inner) for inner in NEWER} - {"ieee", "none"}
            assert not torch.backends.mkldnn.allow_tf32
            assert lower_precisions() == []
            _inner("generic", "all", "tf32")()
            _inner("mkldnn", "all", "bf16")()
        assert inherited() == before


def inherited() -> list[str]:
    """What each precision is, and what it becomes where that from which all may inherit is changed."""
    before = torch._C._get_fp32_precision_getter("generic", "all")
    found = []
    for value in ("ieee", "tf32", before):
        _inner("generic", "all", value)()
        found += [torch._C._get_fp32_precision_getter(*inner) for inner in NEWER]
    return found


def test_lower_precisions_are_named() -> None:
    with preserved():
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        assert lower_precisions() == [
            "cuda.matmul.allow_tf32",
            "cuda.matmul.fp32_precision",
            "mkldnn.matmul.fp32_precision",
            "float32_matmul_precision",
        ]


@pytest.mark.parametrize(
    ("given", "running", "in_force", "said"),
    [
        pytest.param(None, False, ":4096:8", [], id="not set"),
        pytest.param(":16:8", True, ":16:8", [], id="set in time"),
        pytest.param(":0:0", False, ":4096:8", [":0:0 lets cuBLAS differ"], id="set to another value"),
        pytest.param(None, True, ":4096:8", ["CUDA runs already"], id="CUDA runs already"),
    ],
)
def test_workspace_is_claimed_before_cuda_starts(
    given: str | None,
    running: bool,
    in_force: str,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")  # put back afterwards, whatever becomes of it
    if given is None:
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: running)
    with nothing_left(), deterministic_settings("on"):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == in_force
    BenchmarkRunner(RunOptions())
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == given
    for _ in range(2):
        BenchmarkRunner(RunOptions(device="cuda"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == in_force
    assert len(caplog.messages) == len(said)
    assert all(words in message and "\n" not in message for words, message in zip(said, caplog.messages, strict=True))


def test_frozen_flags_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.testing._internal.common_utils calls torch.backends.disable_global_flags() on import.
    monkeypatch.setattr(torch.backends.m, "__allow_nonbracketed_mutation_flag", False)
    before = settings()
    with deterministic_settings("on"):
        assert (settings()["cudnn.deterministic"], settings()["mkldnn.deterministic"]) == ("True", "True")
        with applied({"mkldnn.enabled": "False"}):
            assert settings()["mkldnn.enabled"] == "False"
    assert settings() == before
    assert torch.backends.flags_frozen()
