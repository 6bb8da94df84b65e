"""The folder of a kernel in two companies: written, and run in a fresh process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hashbench.batch.item_call import ItemCall
from hashbench.batch.layout import ItemAxis
from hashbench.batch.repro import SCRIPT_FILE, run_item_repro, write_item_repro
from hashbench.diagnose import fresh_process
from hashbench.errors import HashbenchError
from hashbench.records import Decision

FIRST = ItemAxis(0)
DECISION = Decision("batch_coupling", "proven", "12 of 12 with other content", "Do otherwise.")


def call_of(func: object, *args: object) -> ItemCall:
    return ItemCall(func, args, {}, 4, (FIRST,), (FIRST,))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_kernel_that_computes_over_the_batch_shows_it_with_torch_alone(tmp_path: Path) -> None:
    call = call_of(torch.ops.aten._softmax.default, torch.rand(4, 3), 0, False)
    write_item_repro(tmp_path, call, DECISION, seen_in="the model scaler")
    text = (tmp_path / SCRIPT_FILE).read_text(encoding="utf-8")

    assert "hashbench" not in text.partition('"""\n\nimport')[2]
    assert "return torch.ops.aten._softmax.default(t[0], 0, False)" in text
    assert run_item_repro(tmp_path, timeout=120) == "yes: 1 of 1 items differ between 4 items and 4"


@pytest.mark.slow
def test_rows_that_are_as_long_as_the_batch_are_compared_beside_copies_of_an_item(tmp_path: Path) -> None:
    rows = torch.rand(4, 3)
    call = ItemCall(torch.ops.aten.mm.default, (rows, rows.T.clone()), {}, 4, (FIRST, ItemAxis(1)), (FIRST,))
    write_item_repro(tmp_path, call, DECISION, chosen=range(2))

    assert run_item_repro(tmp_path, timeout=120) == "yes: 1 of 1 items differ between 4 items and 4"


@pytest.mark.slow
def test_a_kernel_that_writes_in_place_is_compared_by_what_it_wrote(tmp_path: Path) -> None:
    call = call_of(torch.ops.aten.add_.Tensor, torch.rand(4, 3), 1.0)
    write_item_repro(tmp_path, call, DECISION, chosen=range(2))

    assert run_item_repro(tmp_path, timeout=120) == "no: 0 of 2 items differ between 2 items and 4"


@pytest.mark.slow
def test_the_same_items_at_other_places_are_compared_item_by_item(tmp_path: Path) -> None:
    call = call_of(torch.ops.aten.cumsum.default, torch.rand(4, 3) + 1, 0)
    write_item_repro(tmp_path, call, DECISION, chosen=[3, 2, 1, 0])

    assert run_item_repro(tmp_path, timeout=120) == "yes: 4 of 4 items differ between two orders of the same items"


@pytest.mark.slow
def test_it_runs_in_a_fork_of_a_server_that_has_loaded_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hashbench.processes.run", None)
    call = call_of(torch.ops.aten._softmax.default, torch.rand(4, 3), 0, False)
    write_item_repro(tmp_path, call, DECISION)
    loaded = "import sys; print([name for name in sys.modules if name.startswith(('torchvision', 'hashbench.trace.'))])"
    with fresh_process.served(fresh_process.TORCH_ALONE, at_once=False):
        assert run_item_repro(tmp_path, timeout=120) == "yes: 1 of 1 items differ between 4 items and 4"
        assert fresh_process.run_python(loaded, seconds=120).stdout == "['hashbench.trace.file']\n"
        (tmp_path / SCRIPT_FILE).write_text("1 / 0")
        assert run_item_repro(tmp_path, timeout=120) == "failed: ZeroDivisionError: division by zero"


def test_what_torch_alone_does_not_have_has_no_repro(tmp_path: Path) -> None:
    with pytest.raises(HashbenchError, match="torch alone does not have it"):
        write_item_repro(tmp_path / "repro", call_of(torch.neg, torch.rand(4, 3)), DECISION, chosen=range(1))
    assert not (tmp_path / "repro").exists()
