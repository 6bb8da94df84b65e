"""Sweeps on a real Ray cluster of this machine: a head that runs no models and two machines as processes, which do.

Models are stand-ins without torch (``ray_targets``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray_targets
from sweep_helpers import alive, names_in_csv, sweep_process, wait_until

from hashbench.core.errors import HashbenchError
from hashbench.core.io import PACKAGE_PARENT
from hashbench.core.records import RunOptions
from hashbench.core.suites import registry
from hashbench.core.sweep import run
from hashbench.core.sweep.executors import Task
from hashbench.core.sweep.run import ModelStarted, run_sweep
from hashbench.extensions.fingerprint import after_sweep as fingerprints
from hashbench.extensions.ray import client as ray_client
from hashbench.extensions.ray import executor as ray_executor
from hashbench.extensions.ray.client import RayClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]

TESTS = Path(__file__).parents[2]
MEMORY = 80 * 2**20  # the least that Ray takes for its objects

DEAD_AFTER_SECONDS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 60_000,
    "health_check_failure_threshold": 2,
}
"""A machine that refuses to answer, as a killed one does, counts as lost after seconds, not after a quarter of a
minute; one that is slow to answer has a minute."""

HEAD_GONE_AFTER = ("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
"""What is left of a cluster without its head ends after seconds, not after a minute. Machines join with what their own
environment says, before they hear what the head's does."""


@pytest.fixture(scope="module")
def cluster():
    """Machines find ``ray_targets``; those of ``worker`` run models, one at a time each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv(*HEAD_GONE_AFTER)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), PACKAGE_PARENT]))
        from ray.cluster_utils import Cluster

        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": MEMORY,
                "include_dashboard": False,
                "_system_config": DEAD_AFTER_SECONDS,
            },
        )
        try:
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def machines(cluster):
    """Two of them; a test that ends one starts another."""
    for _ in range(2):
        add_machine(cluster)
    return cluster


def add_machine(cluster, resource="worker", **arguments):
    return cluster.add_node(num_cpus=1, object_store_memory=MEMORY, resources={resource: 1}, **arguments)


def sweep(address, models, notes, *, resource="worker", patience=120.0, executor=None, **arguments):
    """``models`` maps names to behaviours."""
    try:
        return run_sweep(
            [ray_targets.spec(name, do, notes=notes) for name, do in models.items()],
            RunOptions(),
            output=notes / "results",
            environment={"key": "driver"},
            target="ray_targets:run_model",
            executor=executor or ray_targets.executor(address, resources={resource: 1}, patience=patience),
            **arguments,
        )
    finally:
        for folder in ray_targets.temporary_folders(notes):  # what is killed cannot remove its own
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def when_begun(name, notes, action):
    """Do ``action`` with the process id of its machine once model ``name`` has begun."""

    def wait_and_act():
        wait_until(lambda: name in ray_targets.times_run(notes))
        action(ray_targets.machines(notes)[name])

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def kill_machine(raylet):
    """As a power cut would: nothing of it gets to say good-bye."""
    process = psutil.Process(raylet)
    for member in [process, *process.children(recursive=True)]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue


# --------------------------------------------------------------------------------------------------- what comes back


@pytest.fixture(scope="module")
def finished(machines, tmp_path_factory):
    """One sweep whose models end in every way that matters here."""
    notes = tmp_path_factory.mktemp("finished")
    models = {
        "fine": "pass",
        "slow": "nap",
        "files": "leave_files",
        "dead": "segfault",
        "draft": "segfault_in_diagnosis",
        "hanging": "hang_with_children",
    }
    result = sweep(machines.address, models, notes, timeout=3.0, retries=0)
    return notes, {row.name: row for row in result.rows}


def kept_environments(notes):
    content = json.loads((notes / "results" / "environment.json").read_bytes())
    return content["key"], {environment["key"] for environment in content["previous"]}


def test_every_model_has_one_row_in_the_csv(finished):
    notes, rows = finished
    assert sorted(names_in_csv(notes / "results")) == sorted(rows)
    assert {name: row.accuracy for name, row in rows.items()} == {
        "fine": "pass",
        "slow": "pass",
        "files": "pass",
        "dead": "crashed",
        "draft": "eager_two_runs_differ",
        "hanging": "timeout",
    }


def test_a_model_gets_its_threads_and_its_data_unchanged(finished):
    _, rows = finished
    assert rows["fine"].detail == "threads 1, OpenMP 1, shape (3, 4)"


def test_logs_traces_and_repros_are_here_byte_for_byte(finished):
    results = finished[0] / "results"
    assert (results / "logs" / "fake.inference.files.log").read_text() == "from the model\n"
    assert (results / "traces" / "fake.inference.files.run1.log").read_text() == "a trace\n"
    assert (results / "repro" / "fake.inference.files" / "tensors.pt").read_bytes() == bytes(range(256))


def test_a_sudden_end_says_what_it_says_without_a_cluster(finished):
    _, rows = finished
    assert rows["dead"].error.startswith("killed by SIGSEGV | Fatal Python error")
    assert rows["draft"].error.startswith("the diagnosis did not end: killed by SIGSEGV")
    assert rows["hanging"].error == "no result after 3 s; logs/fake.inference.hanging.log shows where it was"


def test_a_model_that_is_out_of_time_leaves_nothing_running_on_the_machine(finished):
    children = [int(pid) for pid in (finished[0] / "children.txt").read_text().split()]
    assert len(children) == 2
    assert not any(map(alive, children))


def test_what_a_model_is_doing_on_a_machine_is_known_here(machines, tmp_path):
    started = []

    def answer():
        wait_until(lambda: any(event.phase() == "slot_memory: run 2" for event in started), seconds=60)
        (tmp_path / "heard").touch()

    def note(event):
        started.extend([event] if isinstance(event, ModelStarted) else [])

    thread = threading.Thread(target=answer)
    thread.start()
    result = sweep(machines.address, {"a": "tell"}, tmp_path, timeout=90, on_event=note)
    thread.join()
    assert [row.accuracy for row in result.rows] == ["pass"]


def test_rows_name_the_environment_of_their_machine_which_is_kept(finished):
    notes, rows = finished
    own, others = kept_environments(notes)
    assert own == "driver"
    assert {rows[name].env for name in ("fine", "files", "dead", "draft", "hanging")} <= others
    assert others == {f"machine-{raylet}" for raylet in ray_targets.machines(notes).values()}


@pytest.mark.exhaustive
def test_token_invariance_repro_comes_back(machines, tmp_path):
    """A real model, on a machine that loads torch for it, and for its repro once more."""
    (spec,) = (one for one in registry.catalog("specimens") if one.name == "padding_scale")
    options = RunOptions(mode="right-padding-invariance", deterministic="off", threads=1, tracer="python")
    executor = ray_targets.executor(machines.address, resources={"worker": 1}, patience=120.0)
    result = run_sweep([spec], options, output=tmp_path, environment={"key": "driver"}, executor=executor)

    (row,) = result.rows
    assert (row.accuracy, row.kernel) == ("fail_right_padding_invariance", "aten.amax.default"), row.error
    assert row.reproduced == "in a fresh process the same 6 tokens differ between 6 tokens and 12"
    assert {file.name for file in (tmp_path / row.repro).iterdir()} == {"repro.py", "tensors.pt"}


# --------------------------------------------------------------------------------------------------- lost machines


@pytest.mark.exhaustive
def test_fingerprints_come_from_the_machines_with_their_environments(machines, tmp_path):
    executor = ray_targets.executor(machines.address, resources={"worker": 1}, patience=120.0)
    behaviours = {"a": "fingerprint", "b": "fingerprint", "c": "segfault"}
    specs = [ray_targets.spec(name, do, notes=tmp_path) for name, do in behaviours.items()]
    for _ in range(2):  # after a sweep the same executor is started again
        recording = fingerprints.record(
            specs, RunOptions(), executor=executor, environment={}, timeout=120.0, target="ray_targets:run_model"
        )

        assert [file.models[0].name for file in recording.files] == ["a", "b"]
        assert {file.environment["key"] for file in recording.files} <= {
            f"machine-{raylet}" for raylet in ray_targets.machines(tmp_path).values()
        }
        assert recording.files[0].environment["threads"] == {"intra_op": 1}
        assert "SIGSEGV" in recording.failures["c"]


def test_no_row_is_lost_and_none_is_twice_when_a_machine_is_killed(machines, tmp_path):
    models = {"victim": "lose_the_machine_once"} | {f"model{number}": "nap" for number in range(6)}
    with when_begun("victim", tmp_path, kill_machine):
        result = sweep(machines.address, models, tmp_path)
    add_machine(machines)
    assert sorted(names_in_csv(tmp_path / "results")) == sorted(models)
    rows = {row.name: row for row in result.rows}
    assert {row.accuracy for row in rows.values()} == {"pass"}
    assert rows["victim"].retried.startswith(("NodeDiedError", "WorkerCrashedError"))
    assert ray_targets.times_run(tmp_path)["victim"] == 2


@pytest.mark.exhaustive
def test_a_model_that_was_killed_with_its_machine_is_not_said_to_have_crashed(machines, tmp_path):
    """It dies first, and Ray's process lives long enough to tell."""
    models = {"victim": "take_the_machine_along_once", "killed": "kill9"}
    rows = {row.name: row for row in sweep(machines.address, models, tmp_path, retries=0).rows}
    add_machine(machines)
    assert (rows["victim"].accuracy, ray_targets.times_run(tmp_path)["victim"]) == ("pass", 2)
    assert rows["victim"].retried
    assert (rows["killed"].accuracy, rows["killed"].retried) == ("crashed", ""), "its machine has outlived it"
    assert rows["killed"].error.startswith("killed by SIGKILL")


@pytest.mark.exhaustive
def test_a_model_ends_with_the_raylet_of_its_machine_which_nobody_collects(machines, tmp_path):
    """As in a container whose first process does not. Ray's process, whose parent it was, takes it for alive."""
    ended = threading.Event()

    def kill_raylet(raylet):
        psutil.Process(raylet).kill()
        wait_until(lambda: not ray_targets.lives_on(tmp_path))
        ended.set()

    with when_begun("victim", tmp_path, kill_raylet):
        (row,) = sweep(machines.address, {"victim": "lose_the_machine_once"}, tmp_path, timeout=240.0).rows
    add_machine(machines)
    assert ended.is_set(), "not by its own time limit"
    assert (row.accuracy, ray_targets.times_run(tmp_path)["victim"]) == ("pass", 2)


@pytest.mark.exhaustive
def test_a_model_that_ends_rays_process_each_time_is_left_out_in_one_sentence(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "REPETITIONS_AFTER_LOSS", 1)
    models = {"ray_dies": "kill_ray_worker", "fine": "pass"}
    with pytest.raises(
        HashbenchError,
        match=r"^no result for 1 model: ray_dies: .*died every time \(WorkerCrashedError.*\(2 times\)\)\. Run",
    ):
        sweep(machines.address, models, tmp_path)
    assert ray_targets.times_run(tmp_path) == {"ray_dies": 2, "fine": 1}
    assert names_in_csv(tmp_path / "results") == ["fine"]
    sweep(machines.address, {"ray_dies": "pass", "fine": "pass"}, tmp_path, resume=True)
    assert sorted(names_in_csv(tmp_path / "results")) == ["fine", "ray_dies"]


@pytest.mark.exhaustive
def test_what_is_stopped_on_a_machine_is_not_waited_for_for_ever(machines, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_executor, "ANSWER_SECONDS", 0.0)
    (row,) = sweep(machines.address, {"a": "stop_ray_worker_once"}, tmp_path, timeout=10.0).rows
    assert row.accuracy == "pass"
    assert row.retried.startswith("its machine has not said in time how it ended")
    wait_until(lambda: not ray_targets.lives_on(tmp_path))


@pytest.mark.exhaustive
def test_a_sweep_without_any_machine_left_ends_in_time_and_can_be_resumed(machines, tmp_path):
    add_machine(machines, "only")
    models = {"first": "pass", "victim": "lose_the_machine_once"}
    with (
        when_begun("victim", tmp_path, kill_machine),
        pytest.raises(HashbenchError, match=r"no machine .* asks for CPU 1, only 1, and for 1 s none had that"),
    ):
        sweep(machines.address, models, tmp_path, resource="only", patience=1.0)
    assert names_in_csv(tmp_path / "results") == ["first"]
    result = sweep(machines.address, models, tmp_path, resume=True)
    assert [(row.name, row.accuracy) for row in result.rows] == [("first", "pass"), ("victim", "pass")]
    assert ray_targets.times_run(tmp_path) == {"first": 1, "victim": 2}


def test_a_resource_that_no_machine_has_is_named(machines, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(HashbenchError, match=r"asks for CPU 1, hashbench_xpu 1, and for 0\.5 s none had that"):
        sweep(machines.address, {"a": "pass"}, tmp_path, resource="hashbench_xpu", patience=0.5)
    assert not ray_targets.times_run(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------- machines that differ


def test_a_machine_without_hashbench_is_refused(machines, tmp_path, monkeypatch):
    (tmp_path / "hashbench.py").write_text("raise ModuleNotFoundError(\"No module named 'hashbench'\")")
    monkeypatch.chdir(tmp_path)  # Ray's workers search where the driver stands
    bare = add_machine(machines, "bare", env_vars={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(
        HashbenchError, match=r"cannot run models: ModuleNotFoundError: No .*'hashbench\[ray\]=="
    ) as caught:
        sweep(machines.address, {"a": "pass"}, tmp_path, resource="bare")
    machines.remove_node(bare)
    assert "\n" not in str(caught.value)


def test_a_target_that_machines_cannot_import_is_refused(machines, tmp_path):
    with pytest.raises(HashbenchError, match="cannot run models: worker processes cannot import no_such_module"):
        run_sweep(
            [ray_targets.spec("a", notes=tmp_path)],
            RunOptions(),
            output=tmp_path / "results",
            environment={},
            target="no_such_module:run",
            executor=ray_targets.executor(machines.address, resources={"worker": 1}),
        )


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


def ray_sweep(*arguments):
    return sweep_process(*arguments, script=TESTS / "ray_targets.py")


def test_ctrl_c_leaves_nothing_running_on_a_cluster_that_goes_on(machines, tmp_path):
    with ray_sweep(tmp_path / "results", machines.address, "a=hang_with_children", "b=hang", "c=nap") as process:
        wait_until(lambda: (tmp_path / "children.txt").exists())
        wait_until(lambda: len(ray_targets.workers(tmp_path)) == 2)
        servers = [psutil.Process(pid).ppid() for pid in ray_targets.workers(tmp_path)]
        children = [int(pid) for pid in (tmp_path / "children.txt").read_text().split()]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 130
        assert process.stdout.read() == "0 of 3 rows written; continue with --resume\n"
    wait_until(lambda: not any(map(alive, [*ray_targets.workers(tmp_path), *servers, *children])))
    wait_until(lambda: not any(folder.exists() for folder in ray_targets.temporary_folders(tmp_path)))
    assert all(map(alive, ray_targets.machines(tmp_path).values())), "the cluster is not ours"


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_cluster_that_the_sweep_started(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ray_sweep(tmp_path / "results", "", "a=hang") as process:
        wait_until(lambda: ray_targets.workers(tmp_path))
        family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 130
    assert ray_targets.workers(tmp_path)[0] in family
    wait_until(lambda: not any(map(alive, family)))


# ------------------------------------------------------------------------------------------------- what cannot be asked


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        pytest.param(["-d", "cuda:1"], "Ray chooses the device", id="a number of a device"),
        pytest.param(["--address", "ray://a:1"], "is not the address", id="a client's address"),
        pytest.param(["--address", "somewhere"], "is not the address", id="a host alone"),
        pytest.param(
            ["--address", "127.0.0.1:1"],
            "cannot join the Ray cluster at 127.0.0.1:1: Connection refused",
            id="an address where nobody listens",
        ),
    ],
)
def test_one_line_says_what_is_wrong_with(main, tmp_path, flags, text):
    done = main(
        *("sweep", "--inference", "--suite", "specimens", "--output", "results", "--executor", "ray", *flags),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert text in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_cluster_of_another_version_is_refused_in_one_line(cluster, monkeypatch):
    monkeypatch.setattr(ray_client, "_SERVE", "ray_targets:serve_an_older_ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(ray_targets.__file__).parent), PACKAGE_PARENT]))
    with pytest.raises(HashbenchError, match=r"cannot join .* RuntimeError: Version mismatch: .*Ray: 1\.0") as caught:
        RayClient(cluster.address)
    assert "\n" not in str(caught.value)


def test_what_listens_but_is_no_ray_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(ray_client, "CONNECT_SECONDS", 2.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(HashbenchError, match="did not answer as Ray within 2 s"),
    ):
        RayClient(f"127.0.0.1:{server.getsockname()[1]}")


def test_a_file_that_would_land_outside_the_results_folder_is_refused(tmp_path):
    options = RunOptions(output=str(tmp_path / "results"))
    spec = ray_targets.spec("a", notes=tmp_path)
    task = Task("a", spec, options, "m:f", row_path=str(tmp_path / "results/rows/a.json"), log_path="", timeout=1)
    ray_executor._write_files(task, {"logs/a.log": b"x"})
    with pytest.raises(ValueError, match="a file called"):
        ray_executor._write_files(task, {"../elsewhere": b"x"})
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.log"]


# ----------------------------------------------------------------------------------------------- the head is gone


@pytest.mark.exhaustive
def test_a_cluster_without_its_head_is_one_sentence_in_time(cluster, machines, tmp_path, monkeypatch, capfd):
    """The last test: this cluster is of no more use."""
    monkeypatch.setattr(ray_client, "SILENCE_SECONDS", 5.0)
    head = cluster.head_node.all_processes["gcs_server"][0].process

    def kill_the_head(_: object) -> None:
        table = tmp_path / "results" / "accuracy.csv"
        wait_until(lambda: table.is_file() and names_in_csv(table.parent) == ["first"])  # both may run at once
        head.kill()

    with (
        when_begun("victim", tmp_path, kill_the_head),
        pytest.raises(
            HashbenchError, match=r"^lost the Ray cluster at .*: it has not answered for 5 s; rows .*--resume"
        ),
    ):
        sweep(machines.address, {"first": "pass", "victim": "hang"}, tmp_path)
    assert names_in_csv(tmp_path / "results") == ["first"]
    assert capfd.readouterr() == ("", "")
    wait_until(lambda: not ray_targets.lives_on(tmp_path))
    for node in cluster.list_all_nodes():  # which would say good-bye to it for half a minute
        node.kill_all_processes(check_alive=False, allow_graceful=False)
