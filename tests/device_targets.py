"""Stand-ins for ``hashbench.core.check.model:run_model`` that tell what a worker sees of accelerators."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from hashbench.core.records import ModelSpec, Row, RunOptions

SHOWN = ("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG")


def row(spec: ModelSpec, options: RunOptions, **told: object) -> Row:
    return Row(options.device, spec.name, 1, "pass", suite=spec.suite, mode=options.mode, detail=json.dumps(told))


def tell(spec: ModelSpec, options: RunOptions) -> Row:
    """Its environment, once as many models run at the same time as its data say."""
    here = Path(options.output).parent
    (here / f"{spec.name}.here").touch()
    while len(list(here.glob("*.here"))) < spec.arguments.get("together", 1):
        time.sleep(0.01)
    return row(spec, options, **{name: os.environ.get(name) for name in SHOWN})


def start_cuda(spec: ModelSpec, options: RunOptions) -> Row:
    """What is there at the moment at which torch starts CUDA, and whether that is its first moment."""
    preloaded = "torch" in sys.modules
    import torch

    told: dict[str, object] = {
        "preloaded": preloaded,
        "running": torch.cuda.is_initialized(),
        "forked from a process that asked for CUDA": torch.cuda._is_in_bad_fork(),
    }

    def note() -> None:
        told.update({name: os.environ.get(name) for name in SHOWN})
        raise RuntimeError("seen enough")

    torch._C._cuda_init = note
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        told["error"] = str(error)
    return row(spec, options, **told)
