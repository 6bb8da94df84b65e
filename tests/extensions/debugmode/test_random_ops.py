"""Logs of the real DebugMode: two runs of a training step, equal or with one planted difference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hashbench.cli import main
from hashbench.core.catalog import Origin
from hashbench.extensions.debugmode.find import INPUTS_UNKNOWN, NOT_LOGGED, LogVerdict, find
from hashbench.extensions.debugmode.log import FORMAT, VERSION, loads
from hashbench.extensions.debugmode.random_ops import is_random

RANDOM = {"aten::rand": True, "aten::bernoulli_.float": True, "aten::normal.float_Tensor": True, "aten::mm": False}


@pytest.mark.parametrize(("name", "random"), RANDOM.items())
def test_ops_that_draw_are_known_by_their_schema(name: str, random: bool) -> None:
    assert is_random(name) is random


@pytest.mark.parametrize("name", ["aten::rand.nope", "nope::rand", "torch.mm", "", "aten::", "x" * 10_000, "a\x00::b"])
def test_a_name_that_is_no_op_draws_nothing(name: str) -> None:
    assert is_random(name) is False


try:
    from torch.utils import _debug_mode
    from torch.utils._debug_mode import DebugMode

    SAVES = hasattr(DebugMode, "save_logs")
except ImportError:
    SAVES = False

saves = pytest.mark.skipif(not SAVES, reason="DebugMode.save_logs came with torch 2.14")


@saves
def test_this_torch_writes_the_format_that_is_read() -> None:
    assert _debug_mode._mode._SERIALIZED_LOG_FORMAT == FORMAT
    assert _debug_mode._mode._SERIALIZED_LOG_VERSION == VERSION


class Net(torch.nn.Module):
    """A small network with dropout, whose second layer is ``kernel``."""

    def __init__(self, kernel: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.dropout, self.last = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.kernel(self.dropout(self.first(x).relu())))


@pytest.fixture(name="racy")
def _racy() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An op that leaves something else in every run: it adds how often it was called."""
    calls = itertools.count()
    with torch.library._scoped_library("hashbench_logs", "FRAGMENT") as library:
        library.define("racy(Tensor x) -> Tensor")
        library.impl("racy", lambda x: x + next(calls), "CompositeExplicitAutograd")
        library.impl("racy", _straight_through, "Autograd")
        yield torch.ops.hashbench_logs.racy


def _straight_through(x: torch.Tensor) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        added = torch.ops.hashbench_logs.racy(x.detach())
    return x + (added - x.detach())


def _save(
    path: Path,
    kernel: Callable[[torch.Tensor], torch.Tensor] = torch.sin,
    *,
    hash_fn: str | list[str] = "norm",
    hash_inputs: bool = True,
    rate: float = 0.1,
    value: float = 1.0,
    extra: Callable[[], object] = lambda: None,
) -> Path:
    """Train one step under DebugMode and save its log."""
    torch.manual_seed(0)
    net = Net(kernel)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    x = torch.arange(12.0).reshape(3, 4) * value
    with (
        DebugMode(record_nn_module=True, record_stack_trace=True) as mode,
        DebugMode.log_tensor_hashes(hash_fn=hash_fn, hash_inputs=hash_inputs),
    ):
        extra()
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        loss.item()
    DebugMode.save_logs(mode.logs, path)
    return path


def _verdict(first: Path, second: Path) -> LogVerdict:
    return find(*(loads(path.read_text(), name=path.name) for path in (first, second)), is_random=is_random)


HASHES = pytest.mark.parametrize("hash_fn", ["norm", "hash_tensor", ["norm", "hash_tensor"]], ids=str)


@saves
@pytest.mark.slow
@HASHES
@pytest.mark.parametrize("hash_inputs", [True, False], ids=["inputs", "outputs"])
def test_equal_runs_agree(tmp_path: Path, hash_fn: str | list[str], hash_inputs: bool) -> None:
    """Dropout draws into fresh memory, whose content before that is another each time."""
    for number in range(3):
        _save(tmp_path / f"{number}.json", hash_fn=hash_fn, hash_inputs=hash_inputs)
    assert main(["diff", str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == 0
    assert _verdict(tmp_path / "1.json", tmp_path / "2.json").equal


@saves
@pytest.mark.slow
@HASHES
def test_a_racy_kernel_is_named(
    tmp_path: Path,
    racy: Callable[[torch.Tensor], torch.Tensor],
    hash_fn: str | list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (_save(tmp_path / f"{n}.json", racy, hash_fn=hash_fn) for n in "ab")
    found = _verdict(first, second).divergence
    assert found is not None
    assert (found.origin, found.kernel, found.module) == (Origin.KERNEL, "hashbench_logs::racy", "Net")
    assert found.source.startswith("test_random_ops.py:")
    assert main(["diff", str(first), str(second)]) == 1
    assert "first divergence: Net/hashbench_logs::racy#0\norigin:           kernel\n" in capsys.readouterr().out


@saves
@pytest.mark.slow
def test_without_inputs_a_racy_kernel_is_one_of_two_answers(
    tmp_path: Path, racy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    first, second = (_save(tmp_path / f"{n}.json", racy, hash_inputs=False) for n in "ab")
    found = _verdict(first, second).divergence
    assert found is not None
    assert (found.origin, found.kernel) == (INPUTS_UNKNOWN, "hashbench_logs::racy")


@saves
@pytest.mark.slow
@HASHES
def test_other_differences_are_no_kernels(tmp_path: Path, hash_fn: str | list[str]) -> None:
    plain = _save(tmp_path / "plain.json", hash_fn=hash_fn)
    planted = {
        "another input": ({"value": 2.5}, NOT_LOGGED, "aten::addmm"),
        "another learning rate": ({"rate": 0.3}, Origin.OUTSIDE, "aten::add_.Tensor"),
        "calls more": ({"extra": lambda: torch.zeros(2).neg()}, Origin.SEQUENCE, "aten::zeros"),
        "a draw more": ({"extra": lambda: torch.rand(1)}, Origin.SEQUENCE, "aten::rand"),
    }
    for name, (change, origin, kernel) in planted.items():
        other = _save(tmp_path / "other.json", hash_fn=hash_fn, **change)
        for verdict in (_verdict(plain, other), _verdict(other, plain)):
            assert verdict.divergence is not None, name
            assert (verdict.divergence.origin, verdict.divergence.kernel) == (origin, kernel), name


@saves
@pytest.mark.slow
def test_a_call_more_leaves_the_others_aligned_and_does_not_hide_a_kernel(
    tmp_path: Path, racy: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def more() -> torch.Tensor:
        return torch.ones(2).neg()

    clean = _verdict(_save(tmp_path / "a.json"), _save(tmp_path / "b.json", extra=more))
    assert [len(calls) for calls in clean.alone] == [0, 2]
    assert all(pair.alone or not pair.differs for pair in clean.pairs)
    found = _verdict(_save(tmp_path / "c.json", racy), _save(tmp_path / "d.json", racy, extra=more)).divergence
    assert found is not None
    assert (found.origin, found.kernel) == (Origin.KERNEL, "hashbench_logs::racy")
