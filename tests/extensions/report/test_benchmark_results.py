"""The records for PyTorch's benchmark database: their schema, and what they say of a night."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hashbench.cli import main
from hashbench.core.results.rows import ROWS
from hashbench.extensions.report.benchmark_results import METRICS, as_benchmark_results
from hashbench.extensions.report.expectations import assess
from tests.core.report.rows import PLAIN, differing, row, write_night, write_sweep
from tests.extensions.compiled.compiled_rows import INACCURATE

jsonschema = pytest.importorskip("jsonschema", reason="comes with check-jsonschema, of the extra test")

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
"""``Map(String, String)`` of ClickHouse."""


def _tuple(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A ``Tuple`` of ClickHouse: no other names, all of them optional where nothing says more."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, COUNT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "number"}
NUMBERS = {"type": "array", "items": NUMBER, "minItems": 1}
STATUSES = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 1}

SCHEMA = {
    "type": "array",
    "items": _tuple(
        ("benchmark", "model", "metric"),
        benchmark=_tuple(
            ("name", "mode", "dtype"), name={**TEXT, "minLength": 1}, mode=TEXT, dtype=TEXT, extra_info=TEXTS
        ),
        model=_tuple(
            ("name",),
            name={**TEXT, "minLength": 1},
            type=TEXT,
            backend=TEXT,
            origins={"type": "array", "items": TEXT},
            extra_info=TEXTS,
        ),
        inputs={"type": "object", "additionalProperties": _tuple(dtype=TEXT, extra_info=TEXTS)},
        dependencies={
            "type": "object",
            "additionalProperties": _tuple(repo=TEXT, branch=TEXT, sha=TEXT, version=TEXT, extra_info=TEXTS),
        },
        runners={
            "type": "array",
            "items": _tuple(
                **dict.fromkeys(("name", "type", "cpu_info", "mem_info", "gpu_info", "gpu_mem_info"), TEXT),
                **dict.fromkeys(("cpu_count", "avail_mem_in_gb", "gpu_count", "avail_gpu_mem_in_gb"), COUNT),
                extra_info=TEXTS,
            ),
        },
        metric={
            "oneOf": [
                _tuple(
                    ("name", "benchmark_values"),
                    name={**TEXT, "minLength": 1},
                    benchmark_values=NUMBERS,
                    target_value=NUMBER,
                    extra_info=TEXTS,
                ),
                # benchmarks/dynamo/common.py, output_json: a status is no number
                _tuple(
                    ("name", "extra_info"),
                    name={"const": "accuracy"},
                    extra_info=_tuple(("benchmark_values",), benchmark_values=STATUSES),
                ),
            ]
        },
    ),
}
"""``clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql`` of pytorch/test-infra, without what the upload adds."""

ENVIRONMENT = {
    "schema": 1,
    "key": "e1",
    "packages": {"torch": "2.15.0", "numpy": "2.4.6", "triton": None},
    "torch": {"git": "d0f2af8"},
    "cpu": {"model": "AMD EPYC", "machine": "x86_64", "cores": 2},
    "device": {"type": "cuda", "name": "NVIDIA H100", "count": 1},
}


def _records(*folders: Path) -> list[dict[str, Any]]:
    text = as_benchmark_results(assess(list(folders), expected=None))
    records = json.loads(text)
    assert text.count("\n") == len(records) + 2 or text == "[]\n"
    jsonschema.validate(records, SCHEMA)
    return records


def _metrics(records: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The metrics of one model by name: a number, or the status."""
    mine = [one["metric"] for one in records if one["model"]["name"] == name]
    assert len({metric["name"] for metric in mine}) == len(mine)
    return {
        one["name"]: one.get("benchmark_values", one.get("extra_info", {}).get("benchmark_values"))[0] for one in mine
    }


@pytest.fixture(name="night")
def _night(tmp_path: Path) -> list[dict[str, Any]]:
    """A night of models that pass, differ, fail and are skipped, with an environment."""
    rows = [
        row("steady", seconds=1.25, peak_memory_mib=100.5),
        differing("drifts", max_abs_diff=float("inf"), differing_elements=3, env="e1"),
        row("broken", "crashed", error="killed by signal 9"),
        row("skipped", "pass_due_to_skip", error="no CUDA"),
        dataclasses.replace(INACCURATE, name="compiled"),
        row("x\n\x1b[31m::error::\N{RIGHT-TO-LEFT OVERRIDE}\ud800"),
    ]
    write_night(tmp_path / "nights", "2026-11-01", *rows, environment=ENVIRONMENT)
    return _records(tmp_path / "nights")


def test_a_model_that_passes_has_a_status_and_its_numbers(night: list[dict[str, Any]]) -> None:
    assert _metrics(night, "steady") == {"accuracy": "pass", "passed": 1.0, "seconds": 1.25, "peak_memory_mib": 100.5}


def test_kernel_and_cause_are_in_the_extra_info(night: list[dict[str, Any]]) -> None:
    metrics = _metrics(night, "drifts")
    assert (metrics["accuracy"], metrics["passed"], metrics["rate"]) == ("eager_two_runs_differ", 0.0, 1.0)
    assert (metrics["differing_elements"], "max_abs_diff" in metrics) == (3, False)  # infinity is no JSON
    about = next(one["benchmark"] for one in night if one["model"]["name"] == "drifts")
    assert about["name"] == "hashbench"
    assert (about["mode"], about["dtype"]) == ("training", "float32")
    assert (
        about["extra_info"].items()
        >= {
            "device": "cpu",
            "kernel": "aten.index_put_.default",
            "module": "layer1.0",
            "origin": "kernel",
            "cause": "write_race",
            "confidence": "proven",
            "batch_size": "4",
        }.items()
    )


def test_a_compiled_model_has_its_backend_and_stage(night: list[dict[str, Any]]) -> None:
    record = next(one for one in night if one["model"]["name"] == "compiled")
    assert (record["model"]["backend"], record["benchmark"]["extra_info"]["stage"]) == ("inductor", "codegen")
    assert _metrics(night, "compiled")["accuracy"] == "fail_accuracy"
    assert night[0]["model"]["backend"] == "eager"


def test_what_was_skipped_is_neither_passed_nor_failed(night: list[dict[str, Any]]) -> None:
    assert _metrics(night, "skipped") == {"accuracy": "pass_due_to_skip"}
    assert _metrics(night, "broken").items() >= {"accuracy": "crashed", "passed": 0.0}.items()


def test_machine_and_packages_are_those_of_the_row(night: list[dict[str, Any]]) -> None:
    record = next(one for one in night if one["model"]["name"] == "drifts")
    assert record["dependencies"] == {
        "torch": {"version": "2.15.0", "repo": "pytorch/pytorch", "sha": "d0f2af8"},
        "numpy": {"version": "2.4.6"},
    }
    assert record["runners"] == [
        {
            **{"name": "cuda", "type": "NVIDIA H100", "cpu_info": "AMD EPYC", "gpu_info": "NVIDIA H100"},
            **{"cpu_count": 2, "gpu_count": 1},
        }
    ]


def test_an_absent_model_is_missing_and_not_passed(tmp_path: Path) -> None:
    write_night(tmp_path / "nights", "2026-11-01", row("steady"), row("gone"))
    write_night(tmp_path / "nights", "2026-11-02", row("steady"))
    manifest = tmp_path / "nights" / "2026-11-02" / "torchvision_training" / "sweep.json"
    manifest.write_text(manifest.read_text().replace('"models": [', '"models": [["torchvision", "gone"], '))
    assert _metrics(_records(tmp_path / "nights"), "gone") == {"accuracy": "missing", "passed": 0.0}


def test_a_model_that_was_not_asked_for_has_no_record(tmp_path: Path) -> None:
    write_night(tmp_path / "nights", "2026-11-01", row("steady"), row("other"))
    write_night(tmp_path / "nights", "2026-11-02", row("steady"))
    assert {one["model"]["name"] for one in _records(tmp_path / "nights")} == {"steady"}


@pytest.mark.parametrize(
    "environment", [{}, {"packages": [1], "cpu": "x", "torch": None, "device": {"name": 3}}], ids=str
)
def test_an_odd_environment_makes_no_odd_record(tmp_path: Path, environment: dict[str, Any]) -> None:
    known = {"schema": 1, "key": "e1", **environment}
    assert len(_records(write_sweep(tmp_path / "sweep", PLAIN, environment=known))) >= 2


def test_metrics_are_columns_of_numbers() -> None:
    assert {ROWS.types[name] for name in METRICS} == {int, float}


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path / "sweep", row("steady"), differing("drifts"))
    assert main(["report", str(sweep), "--format", "benchmark-results"]) == 0
    records = json.loads(capsys.readouterr().out)
    jsonschema.validate(records, SCHEMA)
    assert {one["model"]["name"] for one in records} == {"steady", "drifts"}
    assert main(["report", str(sweep), "--format", "benchmark-results", "--strict"]) == 1


def test_the_schema_refuses_what_the_database_does() -> None:
    sound = {"benchmark": {"name": "a", "mode": "", "dtype": ""}, "model": {"name": "m"}}
    for metric in (
        {"name": "accuracy", "benchmark_values": ["pass"]},
        {"name": "seconds", "benchmark_values": []},
        {"name": "seconds"},
        {"name": "seconds", "benchmark_values": [1.0], "extra_info": {"n": 1}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{**sound, "metric": metric}], SCHEMA)
