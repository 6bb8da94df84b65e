"""What tells which library computed a call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hashbench.core.native.build import COMPILERS

COUNTER = """
#include <time.h>
int looks = 0;
double difftime(time_t later, time_t earlier) { looks++; return (double)later - (double)earlier; }
"""

LOOKS = """
import ctypes, os, sys, torch
from hashbench.extensions.fingerprint.library import listener, measure_clock

looks = ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "looks")
measured = measure_clock() if "measured" in sys.argv else False
if not os.fork():
    looks.value = 0
    a = torch.ones(8, 8)
    with listener() as listening:
        heard = listening.library_of(torch.ops.aten.mm.default, a.device, lambda: torch.mm(a, a))
    print(measured, heard, looks.value)
    sys.exit()
os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler here")
def test_a_process_whose_parent_knows_the_clock_does_not_measure_it_again(tmp_path: Path) -> None:
    """MKL looks at the system's time until its seconds change."""
    source, library = tmp_path / "counter.c", tmp_path / "counter.so"
    source.write_text(COUNTER)
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)

    def told(*arguments: str) -> list[str]:
        command = [sys.executable, "-c", LOOKS, str(library), *arguments]
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()

    measured, *heard, looks = told("measured")
    assert (measured, heard, int(looks)) == ("True", ["MKL", "SGEMM"], 0)
    unmeasured, *heard, looks = told()
    assert (unmeasured, heard) == ("False", ["MKL", "SGEMM"])
    assert int(looks) > 0
