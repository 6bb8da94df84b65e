"""What a machine of a cluster does with a request, here without a cluster."""

from __future__ import annotations

import importlib
import inspect
import json
import os

import pytest

from hashbench import __version__
from hashbench.core.io import file_digest
from hashbench.extensions.ray import remote
from hashbench.extensions.ray.executor import DEFAULT_FINGERPRINT


@pytest.fixture(autouse=True)
def environment_as_before(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def request(**changed):
    asked = {
        "version": __version__,
        "threads": 2,
        "suites": [],
        "zoo_files": {},
        "preload": [],
        "target": "sweep_targets:run_model",
        "device": "cpu",
        "tracer": "auto",
        "fingerprint": "tests.extensions.ray.test_remote:fingerprint",
    }
    return json.dumps(asked | changed)


def fingerprint(*, device, variables, tracer):
    return {
        "key": "e1",
        "device": device,
        "tracer": tracer,
        "threads": os.environ["OMP_NUM_THREADS"],
        "waiting": dict(variables),
    }


def test_a_machine_that_is_ready_tells_its_environment_as_workers_see_it():
    environment = remote.prepare(request())["environment"]
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert environment == {"key": "e1", "device": "cpu", "tracer": "auto", "threads": "2", "waiting": waiting}


@pytest.mark.parametrize("part", [remote.prepare, remote.run])
def test_another_version_is_a_problem(part):
    problem = part(request(version="99.0"))["problem"]
    assert problem["what"] == f"it has hashbench {__version__}, this sweep is one of 99.0"
    assert problem["tip"] == "Install the same version everywhere."


def test_a_zoo_file_must_be_there_and_be_the_same(tmp_path):
    zoo = tmp_path / "zoo.py"
    zoo.write_text("MODELS = {}")
    asked = request(zoo_files={str(zoo): file_digest(zoo)})
    assert "problem" not in remote.prepare(asked)
    zoo.write_text("MODELS = {1}")
    assert remote.prepare(asked)["problem"]["what"] == f"it has another {zoo}"
    zoo.unlink()
    assert remote.prepare(asked)["problem"]["what"] == f"it has no {zoo}"


def test_the_packages_of_suites_must_be_there(monkeypatch):
    assert remote.prepare(request(suites=["somebodys"]))["problem"]["what"] == "it has no suite 'somebodys'"
    monkeypatch.setattr("hashbench.core.suites.registry._importable", lambda _: False)
    problem = remote.prepare(request(suites=["timm"]))["problem"]
    assert problem["what"] == "cannot sweep timm: the package timm is not installed"


def test_a_target_that_cannot_be_imported_is_a_problem():
    problem = remote.prepare(request(target="no_such_module:run"))["problem"]
    assert problem["what"].startswith("worker processes cannot import no_such_module: ModuleNotFoundError")


def test_a_full_disk_is_a_problem_of_the_machine(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    problem = remote.run(request())["problem"]
    assert problem["what"] == "its temporary folder cannot be used (No space left on device)"


def test_the_real_environment_is_collected_with_the_same_arguments():
    module, _, name = DEFAULT_FINGERPRINT.partition(":")
    collect = inspect.signature(getattr(importlib.import_module(module), name))
    collect.bind(device="cpu", variables={}, tracer="auto")  # as on a machine of a cluster, and nothing more is needed
