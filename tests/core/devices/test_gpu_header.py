"""``pytest -m gpu`` says on what it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def header(pytestconfig: pytest.Config) -> Callable[[str], list[str]]:
    """What pytest says after collecting three tests, of which two are marked ``gpu``, with this ``-m``."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).parents[2] / "conftest.py"))
    items = [SimpleNamespace(get_closest_marker={name: name}.get) for name in ("gpu", "slow", "gpu")]

    def said(expression: str) -> list[str]:
        return conftest.pytest_report_collectionfinish(
            SimpleNamespace(option=SimpleNamespace(markexpr=expression)), items
        )

    return said


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_how_many_are_skipped(header: Callable[[str], list[str]]) -> None:
    (line,) = header("gpu")
    assert line.startswith(f"accelerator: no accelerator, torch {torch.__version__.partition('+')[0]}")
    assert line.endswith(": 2 tests marked gpu will be skipped")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_is_named(header: Callable[[str], list[str]]) -> None:
    (line,) = header("gpu")
    assert torch.get_device_module().get_device_name() in line


def test_other_runs_do_not_ask(header: Callable[[str], list[str]]) -> None:
    assert header("not gpu") == []
