"""Stand-ins for the worker of an audit, without torch: ops that answer, that kill their process, and that hang."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.tools.audit.audit_table import AuditRow, op_file, write_op


def run_group(spec: ModelSpec, options: RunOptions) -> Row:
    """Run the ops of a group: what one does is its name."""
    folder = Path(options.output)
    for source, op in spec.arguments["ops"]:
        if op_file(folder, (source, op)).exists():
            continue
        with (folder / "ran.txt").open("a") as ran:
            ran.write(f"{op}\n")
        if op == "aborts":
            os.abort()
        if op == "hangs":
            time.sleep(60)
        if op == "aborts_beside_others" and len(spec.arguments["ops"]) > 1:
            os._exit(3)
        row = AuditRow(options.device, source, op, "float32", "0", "forward", "as documented", off="identical")
        write_op(folder, (source, op), [row])
    return Row(options.device, spec.name, None, "pass", suite="audit")


def cannot_write(spec: ModelSpec, options: RunOptions) -> Row:
    """As where the file of an op cannot be written."""
    return Row(options.device, spec.name, None, "crashed", suite="audit", error="No space left on device")


def tell_devices(spec: ModelSpec, options: RunOptions) -> Row:
    """As many groups as the seed says wait for each other; each op's row says which device its process sees."""
    folder = Path(options.output)
    (folder / f"{spec.name}.here").touch()
    while len(list(folder.glob("*.here"))) < options.seed:
        time.sleep(0.01)
    for source, op in spec.arguments["ops"]:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        row = AuditRow(options.device, source, op, "float32", "0", "forward", "as documented", error=seen)
        write_op(folder, (source, op), [row])
    return Row(options.device, spec.name, None, "pass", suite="audit")
