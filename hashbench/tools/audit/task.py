"""What a worker process of an audit does: the ops of one group, one after another, each into a file of its own.

An op's file appears under its final name only when it is whole. Ops run in their order, so that where the process
dies, the first without a file is to blame.
"""

from __future__ import annotations

import faulthandler
import json
from pathlib import Path
from typing import Any

from hashbench.io import replace_file, to_json
from hashbench.processes import variables
from hashbench.records import ModelSpec, Row, RunOptions
from hashbench.results.folder import file_key

SUITE = "audit"
GROUP_TARGET = "hashbench.tools.audit.task:run_group"
CATALOG_TARGET = "hashbench.tools.audit.task:write_catalog"

WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it cuBLAS is refused under the flag, as torch documents; the audit asks about kernels, not about that."""


def op_file(folder: Path, source: str, op: str) -> Path:
    """Where the rows of an op belong."""
    return folder / "ops" / f"{file_key(suite=source, mode='op', name=op)}.json"


def catalog_file(folder: Path) -> Path:
    """Where a worker writes which ops there are, since only a worker may import torch's test helpers."""
    return folder / "catalog.json"


def write_catalog(spec: ModelSpec, options: RunOptions) -> Row:
    """Every ``(source, op)``, as JSON."""
    from hashbench.tools.audit import cases

    replace_file(catalog_file(Path(options.output)), json.dumps(cases.catalog()))
    return _done(spec, options)


def run_group(spec: ModelSpec, options: RunOptions) -> Row:
    """Run the ops that ``spec.arguments`` names and that have no file yet. The process ends itself where one takes
    longer than it may."""
    import torch

    folder, arguments = Path(options.output), spec.arguments
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with variables(WORKSPACE, unless_set=True):
        for source, op in arguments["ops"]:
            if not op_file(folder, source, op).exists():
                faulthandler.dump_traceback_later(arguments["seconds"], exit=True)
                _run_op(folder, source, op, arguments["options"], threads=torch.get_num_threads())
    faulthandler.cancel_dump_traceback_later()
    return _done(spec, options)


def _run_op(folder: Path, source: str, op: str, values: dict[str, Any], *, threads: int) -> None:
    from hashbench.tools.audit.rows import AuditOptions, rows_of

    print(f"{source} {op}", flush=True)
    rows = [to_json(row) for row in rows_of(source, op, AuditOptions.of(values), threads=threads)]
    replace_file(op_file(folder, source, op), json.dumps(rows))


def _done(spec: ModelSpec, options: RunOptions) -> Row:
    return Row(dev=options.device, name=spec.name, batch_size=None, accuracy="pass", suite=SUITE)
