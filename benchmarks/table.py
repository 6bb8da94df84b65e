"""A benchmark's outcome: a table of figures beside their goals, and the machine it was measured on."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field

import tabulate
import torch


@dataclass(frozen=True, slots=True)
class Table:
    """What one benchmark prints: plain texts and numbers, and notes that explain them."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    notes: tuple[str, ...] = field(default=())

    def text(self) -> str:
        """The table for a terminal or a README."""
        body = tabulate.tabulate(self.rows, headers=self.headers, tablefmt="github", disable_numparse=True)
        return "\n".join([f"## {self.title}", "", body, "", *self.notes])


def against(figure: float, *, goal: float, unit: str = "", at_most: bool = True) -> tuple[str, str, str]:
    """Three cells: the figure, its goal, and whether it is reached."""
    reached = figure <= goal if at_most else figure >= goal
    sign = "≤" if at_most else "≥"
    return f"{figure:.3g}{unit}", f"{sign} {goal:g}{unit}", "yes" if reached else "no"


def machine() -> dict[str, str]:
    """Where and when: a figure without these means nothing."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg()) if hasattr(os, "getloadavg") else ""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": str(os.cpu_count()),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "load of the last 1, 5, 15 minutes": load,
    }
