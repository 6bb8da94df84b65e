"""Export a night for PyTorch's dashboards: the records of its benchmark database, a record for each row and metric.

The schema is that of the table ``oss_ci_benchmark_v3`` (``clickhouse_db_schema`` in pytorch/test-infra). A status is
written as ``benchmarks/dynamo`` does, as ``metric.extra_info.benchmark_values``, since a value is a number. The action
``upload-benchmark-results`` adds what it knows of the workflow (commit, job, time) and uploads the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hashbench.core.catalog import Kind, kind_of
from hashbench.core.records import Row, value_of
from hashbench.extensions.report.expectations import JudgedNight, Judgement

BENCHMARK = "hashbench"
"""Name of the benchmark in the database."""

METRICS: Mapping[str, str] = {
    "rate": "share",
    "distinct": "outcomes",
    "differing_elements": "elements",
    "max_abs_diff": "",
    "beyond_rounding": "times rounding",
    "seconds": "s",
    "compile_seconds": "s",
    "peak_memory_mib": "MiB",
    "device_memory_mib": "MiB",
}
"""Columns that are metrics, besides ``accuracy`` and ``passed``, and their units."""

_ABOUT = (
    *("origin", "kernel", "op", "module", "phase", "source", "cause", "confidence", "stage", "detail", "error"),
    *(
        "latent",
        "latent_kernel",
        "latent_cause",
        "batch_size",
        "iterations",
        "runs",
        "threads",
        "deterministic",
        "tracer",
    ),
)
"""Columns in the ``extra_info`` of a benchmark."""

_LARGEST = 3.4e38
"""Of a Float32, as which the database keeps values."""


def as_benchmark_results(judged: JudgedNight) -> str:
    """Return a JSON list of the last night's records, one a line.

    A model that was asked for and has no row is the status ``missing``, which is not passed.
    """
    records = [
        record
        for each in sorted(judged.judgements, key=lambda judgement: judgement.key)
        for record in _records(each, judged)
    ]
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    return f"[\n{lines}\n]\n" if records else "[]\n"


def _records(judgement: Judgement, judged: JudgedNight) -> Iterator[dict[str, Any]]:
    """Yield the records of one model, each with one metric."""
    if judgement.new is None and not judgement.worse:
        return  # of an earlier night, and not asked for in this one
    status = judgement.now or str(judgement.status)
    common = _common(judgement, judged)
    yield {**common, "metric": {"name": "accuracy", "extra_info": {"benchmark_values": [status]}}}
    if kind_of(status) is not Kind.SKIP:
        passed = float(judgement.new is not None and kind_of(status).is_fine)
        yield {**common, "metric": {"name": "passed", "benchmark_values": [passed], "target_value": 1.0}}
    for column, unit in METRICS.items():
        value = value_of(judgement.new, column)
        if value is not None and abs(value) <= _LARGEST:
            metric = {"name": column, "benchmark_values": [value]}
            yield {**common, "metric": {**metric, "extra_info": {"unit": unit}} if unit else metric}


def _common(judgement: Judgement, judged: JudgedNight) -> dict[str, Any]:
    """Return what all records of a model share."""
    suite, mode, dtype, device, name = judgement.key
    row = judgement.new
    about = {column: str(value) for column in _ABOUT if (value := value_of(row, column)) not in (None, "")}
    environment = {} if row is None else judged.night.environments.get(row.env, {})
    return {
        "benchmark": {
            "name": BENCHMARK,
            "mode": mode,
            "dtype": dtype,
            "extra_info": {"device": device, "expectation": str(judgement.status), **about},
        },
        "model": {"name": name, "type": "model", "backend": _backend(row), "origins": [suite]},
        **({"dependencies": _dependencies(environment), "runners": [_runner(environment)]} if environment else {}),
    }


def _backend(row: Row | None) -> str:
    return (row.backend if row is not None else "") or "eager"


def _dependencies(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the packages of an environment; of torch also the commit."""
    packages = {
        name: {"version": version}
        for name, version in _part(environment, "packages").items()
        if isinstance(version, str)
    }
    commit = _part(environment, "torch").get("git")
    if "torch" in packages and isinstance(commit, str):
        packages["torch"] |= {"repo": "pytorch/pytorch", "sha": commit}
    return packages


def _runner(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machine on which the models ran, which may not be the one that uploads."""
    cpu, device = _part(environment, "cpu"), _part(environment, "device")
    names = {"cpu_info": cpu.get("model") or cpu.get("machine"), "gpu_info": device.get("name")}
    counts = {"cpu_count": cpu.get("cores"), "gpu_count": device.get("count")}
    known = {name: text for name, text in names.items() if isinstance(text, str)}
    numbers = {name: number for name, number in counts.items() if isinstance(number, int)}
    kind = known.get("gpu_info") or known.get("cpu_info", "")
    return {"name": str(device.get("type", "")), "type": kind, **known, **numbers}


def _part(environment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of an environment, which comes from a file."""
    part = environment.get(name)
    return part if isinstance(part, Mapping) else {}
