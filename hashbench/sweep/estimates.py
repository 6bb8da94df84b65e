"""Time and memory estimates from a previous sweep's results.

Only the order and the company in which models run follow from it, never a result; so what cannot be read is
passed over, unless the user named it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hashbench.catalog import OUT_OF_MEMORY
from hashbench.errors import HashbenchError
from hashbench.records import ModelSpec, Row
from hashbench.results.load import ACCURACY_FILE, SELECTION_FILE, load_sweep
from hashbench.sweep.schedule import Job, estimated_memory_mib

CONTEXT_MIB = 700.0
"""What a process takes of a GPU's memory beside torch's allocator: the context, the kernels' code and the workspaces of
the libraries. An estimate, not measured here; too low a value shows as rows that ran out of memory and are repeated."""

_LOOKED_AT = 50
"""Earlier folders that are opened at most, the newest first: there may be thousands."""


@dataclass(frozen=True, slots=True)
class EarlierSweep:
    """What ``label`` says of models, by ``(suite, name)``: seconds from the start of a worker to its end, the peak
    of its process in MiB, and that of an accelerator's memory; models are left out of what is not known of them."""

    label: str = ""
    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    memory_mib: Mapping[tuple[str, str], float] = field(default_factory=dict)
    device_memory_mib: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def job(self, key: str, spec: ModelSpec, *, mode: str, device: str) -> Job:
        """What is to be expected of ``spec``. What the number of parameters says of memory was measured on CPU only."""
        model = (spec.suite, spec.name)
        memory = self.memory_mib.get(model)
        if memory is None and device == "cpu":
            memory = estimated_memory_mib(spec.parameters, mode=mode)
        on_device = self.device_memory_mib.get(model)
        return Job(
            key,
            seconds=self.seconds.get(model),
            memory_mib=memory,
            parameters=spec.parameters or 0,
            device_memory_mib=None if on_device is None else on_device + CONTEXT_MIB,
        )


def read(path: Path, *, mode: str, device: str) -> EarlierSweep:
    """What the sweep at ``path`` (a results folder, or a CSV) tells about the same models in ``mode`` on ``device``.

    Raises:
        HashbenchError: it cannot be read, or has no times for any model in this mode on this device.
    """
    rows = [row for row in load_sweep(path).rows if (row.mode, row.dev) == (mode, device)]
    seconds = {(row.suite, row.name): row.seconds + (row.overhead_seconds or 0.0) for row in rows if row.seconds}
    if not seconds:
        raise HashbenchError(
            f"{path} has no times for {mode} on {device}",
            consequence="no order follows from it",
            tip="Name another sweep with --times-from, or leave it out.",
        )
    sufficed = [row for row in rows if row.accuracy not in OUT_OF_MEMORY]  # those wanted more than they got
    return EarlierSweep(
        str(path),
        seconds,
        memory_mib={(row.suite, row.name): peak for row in sufficed if (peak := _peak(row))},
        device_memory_mib={(row.suite, row.name): row.device_memory_mib for row in sufficed if row.device_memory_mib},
    )


def _peak(row: Row) -> float | None:
    """Until schema 3, a row of an accelerator had the device's peak in place of the process's."""
    return row.peak_memory_mib if row.dev == "cpu" or row.device_memory_mib is not None else None


def newest_before(output: Path, *, models: Collection[tuple[str, str]], mode: str, device: str) -> EarlierSweep:
    """The newest sweep in this mode, on this device, of at least half of ``models``, as ``(suite, name)``, that lies
    beside ``output``, or under the same name beside its parent (``<night>/<suite>_<mode>``); one that says nothing
    where there is none."""
    for manifest in _newest_manifests(output.absolute()):
        try:
            content = json.loads(manifest.read_bytes())
            asked, known = content["options"], {(suite, name) for suite, name in content["models"]}
            enough = 2 * len(known.intersection(models)) >= len(models)
            if enough and (asked["mode"], asked["device"]) == (mode, device):
                return read(manifest.parent, mode=mode, device=device)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, HashbenchError):
            continue
    return EarlierSweep()


def _newest_manifests(output: Path) -> list[Path]:
    try:
        dated = [(manifest.stat().st_mtime, manifest) for manifest in _manifests(output)]
    except OSError:
        return []
    return [manifest for _, manifest in sorted(dated, reverse=True)[:_LOOKED_AT]]


def _manifests(output: Path) -> Iterator[Path]:
    beside = output.parent.glob(f"*/{SELECTION_FILE}")
    other_nights = output.parents[1].glob(f"*/{output.name}/{SELECTION_FILE}") if len(output.parents) > 1 else ()
    for manifest in (*beside, *other_nights):
        if manifest.parent.resolve() != output.resolve() and manifest.with_name(ACCURACY_FILE).is_file():
            yield manifest
