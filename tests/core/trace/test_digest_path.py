"""Which function makes digests where: chosen, brought by a package, and replaced when it fails."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hashbench
import hashbench.core.sweep.run
from hashbench import HashDebugTrace, cli
from hashbench.core.devices import ledger, reference
from hashbench.core.devices.ledger import DeviceKind, DigestPath, Ledger, Unfit, digest_path
from hashbench.core.devices.reference import bytes_of, digest_of_bytes
from hashbench.core.errors import HashbenchError
from hashbench.core.report.compare import environment_changes
from hashbench.core.run import environment
from hashbench.core.sweep.run import SweepInterrupted

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
DOCUMENT = Path(hashbench.__file__).parents[2] / "docs" / "devices.md"


def expected(tensor: torch.Tensor) -> int:
    return digest_of_bytes(bytes(bytes_of(tensor).tolist()))


def broken(_tensor: torch.Tensor, totals: torch.Tensor, place: int) -> None:
    totals[place] = 77  # what a launch that fails half-way may leave
    raise RuntimeError("ptxas fatal: Value 'sm_60' is not defined\nand so on")


def raising(error: Exception) -> Callable[[torch.device], ledger.Accumulate]:
    def load(_device: torch.device) -> ledger.Accumulate:
        raise error

    return load


# ------------------------------------------------------------------------------------------------------ chosen

GOOD = DeviceKind("good", ("cuda",), lambda _device: broken)
OTHER = DeviceKind("other", ("xpu",), lambda _device: broken)
UNFIT = DeviceKind("unfit", ("cuda",), raising(Unfit("it is not installed")))
FAILING = DeviceKind("failing", ("cuda",), raising(ImportError("no module named x\nmore")))


@pytest.mark.parametrize(
    ("built_in", "path"),
    [
        pytest.param((GOOD,), DigestPath("good"), id="for this device"),
        pytest.param((OTHER, GOOD), DigestPath("good"), id="not that of another device"),
        pytest.param((UNFIT, GOOD), DigestPath("good"), id="the next one where one is unfit"),
        pytest.param((), DigestPath("torch ops", "nothing faster is known for cuda"), id="none"),
        pytest.param((UNFIT,), DigestPath("torch ops", "unfit: it is not installed"), id="unfit"),
        pytest.param((FAILING,), DigestPath("torch ops", "failing: ImportError: no module named x"), id="failing"),
        pytest.param(
            (UNFIT, FAILING),
            DigestPath("torch ops", "unfit: it is not installed; failing: ImportError: no module named x"),
            id="two that do not",
        ),
    ],
)
def test_the_first_that_can_be_loaded_is_taken(
    built_in: tuple[DeviceKind, ...], path: DigestPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "BUILT_IN", built_in)
    found, function = ledger.chosen(CUDA)
    assert found == path
    assert function is (broken if path.name == "good" else reference.accumulate)


@pytest.mark.parametrize(
    ("device", "capability", "installed", "reason"),
    [
        ("cuda", (6, 1), True, "triton: needs compute capability 7.0, this card has 6.1"),
        ("cuda", (9, 0), False, "triton: it is not installed"),
        ("xpu", None, False, "triton: it is not installed"),
        ("mps", None, True, "nothing faster is known for mps"),
    ],
)
def test_why_triton_is_not_taken(
    device: str, capability: tuple[int, int], installed: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(ledger.importlib.util, "find_spec", lambda _name: object() if installed else None)
    assert ledger.chosen(torch.device(device))[0] == DigestPath("torch ops", reason)


def test_triton_used_if_installed_and_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernel = pytest.importorskip("hashbench.core.devices.triton_kernel")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    for device in (CUDA, torch.device("xpu")):
        assert ledger.chosen(device) == (DigestPath("triton"), triton_kernel.accumulate)


# ------------------------------------------------------------------------------------------- one that fails


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[ledger.Accumulate], None]:
    """Makes a function the one for the CPU, which stands for an accelerator."""

    def install(function: ledger.Accumulate) -> None:
        monkeypatch.setattr(ledger, "BUILT_IN", (DeviceKind("stand-in", ("cpu",), lambda _device: function),))

    return install


@pytest.mark.parametrize("good", [0, 3], ids=["at once", "in the middle"])
def test_a_function_that_fails_is_replaced_with_one_warning(good: int, stand_in: Any) -> None:
    calls: list[int] = []

    def accumulate(tensor: torch.Tensor, totals: torch.Tensor, place: int) -> None:
        calls.append(place)
        (reference.accumulate if place < good else broken)(tensor, totals, place)

    stand_in(accumulate)
    book = Ledger(everywhere=True)
    assert book.path(CPU) == DigestPath("stand-in")
    tensors = [torch.randn(number) for number in range(1, 6)]
    with pytest.warns(UserWarning, match="ptxas fatal") as caught:
        pending = [book.add(tensor) for tensor in tensors]
    reason = "stand-in: RuntimeError: ptxas fatal: Value 'sm_60' is not defined"
    assert [str(warning.message) for warning in caught] == [
        f"digests on cpu are made by torch's own ops, which is slow ({reason})"
    ]
    assert calls == list(range(good + 1))
    assert [digest.resolve() for digest in pending] == [expected(tensor) for tensor in tensors]
    assert book.path(CPU).reason == reason


def test_memory_that_runs_out_stays_what_it_is(stand_in: Any) -> None:
    """The runner knows it as a status of its own; torch's own ops need more memory, not less."""

    def full(_tensor: torch.Tensor, _totals: torch.Tensor, _place: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stand_in(full)
    book = Ledger(everywhere=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError):
            book.add(torch.ones(3))


def test_where_torchs_own_ops_fail_too_their_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "accumulate", broken)
    with pytest.raises(RuntimeError, match="ptxas"):
        Ledger(everywhere=True).add(torch.ones(3))


def test_a_trial_tells_the_path_with_the_reason_of_a_failure(stand_in: Any) -> None:
    stand_in(broken)
    with pytest.warns(UserWarning, match="ptxas"):
        path = ledger.verified_path(Ledger(everywhere=True), CPU)
    assert path == DigestPath("torch ops", "stand-in: RuntimeError: ptxas fatal: Value 'sm_60' is not defined")


def test_a_trial_refuses_a_function_that_is_wrong(stand_in: Any) -> None:
    stand_in(lambda _tensor, totals, place: totals[place].add_(1))
    with pytest.raises(HashbenchError, match=r"digests on cpu by stand-in are wrong: 251 bytes give [0-9a-f]{16} in"):
        ledger.verified_path(Ledger(everywhere=True), CPU)


def test_a_trial_says_what_a_device_cannot_do() -> None:
    with pytest.raises(HashbenchError, match=r"cannot compute digests on cuda:99: nothing can be traced there \("):
        digest_path("cuda:99")


# ------------------------------------------------------------------------------------- told at the start


def test_a_sweep_on_a_device_that_falls_back_prints_that_line_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"key": "e", "device": {"type": "cpu"}, "digests": {"name": "torch ops", "reason": "there is no compiler"}}
    monkeypatch.setattr(environment, "collect_in_child", lambda **_: dict(slow))

    def stopped(*_args: Any, **kwargs: Any) -> None:
        assert kwargs["environment"]["digests"] == slow["digests"]
        raise SweepInterrupted(done=0, total=1, output=tmp_path)

    monkeypatch.setattr("hashbench.core.sweep.request.run_sweep", stopped)
    cli.main(["sweep", "--inference", "--only", "resnet18", "--output", str(tmp_path / "results")])
    assert capsys.readouterr().err.splitlines()[0] == (
        "hashbench: digests on cpu are made by torch ops, which is slow: there is no compiler (docs/devices.md)"
    )


def test_sweeps_with_other_paths_are_compared_as_if_it_were_one() -> None:
    base, new = ({"digests": {"name": name, "reason": "x"}, "cpu": "same"} for name in ("triton", "torch ops"))
    assert environment_changes([base], [new]) == ()
    assert environment_changes([{"cpu": "same"}], [new]) == ()


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({}, ""),
        ({"device": {"type": "cpu"}, "digests": {"name": "xxhash", "reason": ""}}, ""),
        ({"device": {"type": "cuda"}, "digests": {"name": "triton", "reason": ""}}, ""),
        (
            {"device": {"type": "mps"}, "digests": {"name": "torch ops", "reason": "nothing faster is known for mps"}},
            "digests on mps are made by torch ops, which is slow: nothing faster is known for mps (docs/devices.md)",
        ),
    ],
)
def test_a_sweep_begins_with_a_line_where_digests_are_slow(found: dict[str, Any], line: str) -> None:
    assert environment.digests_note(found) == line


def test_the_environment_says_how_digests_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "exit_at_once", sys.exit)
    with pytest.raises(SystemExit):
        environment.main("cpu")
    assert json.loads(capsys.readouterr().out)["digests"] == {"name": "xxhash", "reason": ""}


# -------------------------------------------------------------------------------- a package, by the document


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What docs/devices.md tells a package to hold, for the CPU in place of ``mydevice``."""
    if not DOCUMENT.exists():
        pytest.skip("hashbench is installed, there are no documents")
    import tomllib

    (code,), (entries,) = blocks("python"), blocks("toml")
    group = tomllib.loads(entries)["project"]["entry-points"]
    assert list(group) == [ledger.GROUP]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "digests.py").write_text(code)
    metadata = tmp_path / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{ledger.GROUP}]\ncpu = {group[ledger.GROUP]['mydevice']}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "my_package" / "digests.py"


TENSORS = {
    "one byte": torch.tensor([3], dtype=torch.uint8),
    "an odd address": torch.arange(100, dtype=torch.uint8)[1:],
    "no whole word": torch.arange(11, dtype=torch.int16),
    "columns": torch.randn(3, 5).t(),
    "complex": torch.randn(7, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
}


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", TENSORS)
def test_device_file_of_the_docs_agrees_with_reference(name: str) -> None:
    book = Ledger(everywhere=True)
    assert book.path(CPU) == DigestPath("my_package.digests")
    first, second = book.add(TENSORS[name]), book.add(TENSORS[name])
    assert first.resolve() == second.resolve() == expected(TENSORS[name])


@pytest.mark.usefixtures("package")
def test_a_trace_is_made_with_the_function_of_a_package() -> None:
    def traced() -> tuple[list[Any], set[str]]:
        net = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.ones_(net.bias)
        with HashDebugTrace(model=net, digests="device") as trace:
            net(torch.ones(2, 3)).sum().backward()
        return [record.outputs for record in trace.finish().records], set(sys.modules)

    outputs, modules = traced()
    assert "my_package.digests" in modules
    with pytest.MonkeyPatch.context() as without:
        without.setattr(ledger, "_from_packages", lambda _type: ())
        assert traced()[0] == outputs


def test_a_package_that_fails_on_import_is_the_reason(package: Path) -> None:
    package.write_text("raise RuntimeError('no licence')")
    assert Ledger(everywhere=True).path(CPU).reason == "my_package.digests: RuntimeError: no licence"


# ------------------------------------------------------------------------------------- streams, as stand-ins


class Stream:
    """One of a device's streams."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id, self.log = stream_id, []

    def record_event(self) -> str:
        return f"zeros of {self.stream_id}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"waits for {event}")


def test_a_stream_waits_once_for_the_zeros_and_the_host_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a device with streams. Memory is kept for a stream that its allocator does not know of."""
    one, other = Stream(1), Stream(2)
    current, synchronized = [one], []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CPU)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: current[-1])
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _self, stream: stream.log.append("keeps the memory"))
    monkeypatch.setattr(ledger, "CHUNK", 6)
    book, tensor = Ledger(everywhere=True), torch.ones(3)
    pending = [book.add(tensor), book.add(tensor)]
    current.append(other)
    pending += [book.add(tensor), book.add(tensor)]
    current.append(one)
    pending += [book.add(tensor)]
    assert (one.log, other.log) == ([], ["waits for zeros of 1", "keeps the memory"])
    current.append(other)
    pending += [book.add(tensor), book.add(tensor)]  # the second is the first of another piece of memory
    current.append(one)
    pending += [book.add(tensor)]
    assert (one.log, other.log[2:]) == (["waits for zeros of 2", "keeps the memory"], [])
    assert synchronized == []
    assert {found.resolve() for found in pending} == {expected(tensor)}
    assert synchronized == [CPU, CPU]
