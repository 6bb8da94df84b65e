"""The fork server and its workers: what they inherit and what they must not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sweep_helpers import alive, sweep, wait_until
from sweep_targets import spec

from hashbench.core.diagnose.fresh_process import POOL_VARIABLE, SERVER_VARIABLE
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import preload_to
from hashbench.core.results.rows import read_rows
from hashbench.core.run import environment
from hashbench.core.sweep.executors.local import DEFAULT_PRELOAD, LocalExecutor, answer_of_a_fork, preload_for
from hashbench.core.sweep.request import local_devices
from hashbench.core.workers import WORKER_VARIABLES, WORKERS

TESTS = Path(__file__).parents[3]
METHODS = ("fork", "forkserver", "spawn")
SCRIPT = TESTS / "sweep_targets.py"
CLEARED = {"PYTHONSAFEPATH", "PYTHONUNBUFFERED"}


def run_script(folder: Path, *arguments: str, cwd: Path | None = None, **environment: str):
    """One sweep in a fresh process, and with it a fresh fork server; returns the text of its row file."""
    env = {name: value for name, value in os.environ.items() if name not in CLEARED}
    done = subprocess.run(
        [sys.executable, SCRIPT, folder / "results", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd or folder,
        env=env | environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return (folder / "results" / "rows" / "fake.inference.a.json").read_text()


@pytest.mark.slow
def test_a_preloaded_module_is_imported_once_by_the_server(tmp_path):
    row = run_script(tmp_path, "--preload", "sweep_targets", "a=pass", PYTHONPATH=str(TESTS))
    loaded_in, server = re.search(r"loaded in (\d+), server (\d+)", row).groups()
    assert loaded_in == server


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        pytest.param("raise RuntimeError('operator torchvision::nms does not exist')", id="fails"),
        pytest.param("import no_such_module", id="lacks a module"),
    ],
)
def test_a_library_that_cannot_be_preloaded_does_not_end_the_server(tmp_path, content):
    library = tmp_path / "library"
    library.mkdir()
    (library / "torchvision.py").write_text(content)
    # The real list, with a broken torchvision in front of the real one; torch itself is hidden to be quick.
    (library / "torch.py").write_text("raise ImportError")
    assert '"accuracy": "pass"' in run_script(
        tmp_path, "--preload", " ".join(DEFAULT_PRELOAD), "a=pass", PYTHONPATH=f"{library}:{TESTS.parent}"
    )


@pytest.mark.slow
def test_the_current_folder_is_not_searched_for_modules(tmp_path):
    """A user who stands in a checkout of PyTorch has a folder ``torch`` there that is not the installed one."""
    (tmp_path / "sweep_targets.py").write_text("raise RuntimeError('the wrong file')")
    row = run_script(tmp_path, "--preload", "sweep_targets", "a=signals")
    assert "safe path None" in row


@pytest.mark.slow
def test_a_model_sees_no_blocked_signal_and_ignores_ctrl_c(tmp_path):
    assert "blocked [], SIGINT ignored True" in run_script(tmp_path, "a=signals")


@pytest.mark.slow
def test_what_was_printed_just_before_a_sudden_end_is_quoted(tmp_path):
    assert "exit code 3 and no result | giving up" in run_script(tmp_path, "a=exit3")


@pytest.mark.slow
def test_ctrl_c_during_the_preload_ends_the_sweep_at_once_and_quietly(tmp_path):
    (tmp_path / "slow_to_import.py").write_text(
        "import pathlib, time\nhere = pathlib.Path(__file__)\nhere.with_name('begun').touch()\n"
        "while not here.with_name('over').exists(): time.sleep(0.02)\n"
    )
    process = subprocess.Popen(
        [sys.executable, SCRIPT, tmp_path / "results", "--preload", "slow_to_import", "a=pass"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    try:
        wait_until((tmp_path / "begun").exists)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == 130, "it does not wait until the import is over"
        assert process.stdout.readline() == "0 of 1 rows written; continue with --resume\n"
    finally:
        (tmp_path / "over").touch()
    assert process.stdout.read() == "", "the server, which notices when its import is over"


@pytest.mark.slow
def test_another_preload_gets_another_server_and_the_same_one_is_kept(tmp_path):
    code = (
        "import sys; from pathlib import Path; from hashbench.core.workers import WORKERS\n"
        "import sweep_targets\n"
        "pids = []\n"
        "for number, module in enumerate(['json', 'json', 'csv']):\n"
        "    folder = Path(sys.argv[1]) / str(number)\n"
        "    assert sweep_targets.main([str(folder / 'results'), '--preload', module, 'a=pass']) == 0\n"
        "    pids.append(WORKERS.pid)\n"
        "assert pids[0] == pids[1] != pids[2], pids\n"
    )
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=TESTS)
    wait_until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])])


@pytest.mark.slow
@pytest.mark.parametrize(("tracer", "recorder"), [("native", True), ("python", False)])
def test_the_server_loads_torch_and_the_recorder_once_and_starts_no_threads(tmp_path, tracer, recorder):
    preload = preload_for(tracer, *(preload_to("fingerprint") if recorder else ()))
    row = run_script(tmp_path, "--preload", " ".join(preload), "a=torch")
    assert f"torch preloaded True, recorder {recorder}, threads in the server 1, in parallel 2" in row


class TestTheEnvironmentIsToldByAForkOfTheServer:
    @pytest.fixture(autouse=True)
    def _nothing_is_known(self, monkeypatch):
        monkeypatch.setattr(environment, "recall", lambda _: None)

    @pytest.mark.slow
    def test_no_python_is_started_for_it_and_it_is_what_one_would_tell(self, monkeypatch):
        monkeypatch.setenv("ATEN_SET_FOR_A_TEST", "1")  # after a server has started, perhaps
        told = environment.collect_in_child(device="cpu", variables=WORKER_VARIABLES, tracer="python")
        monkeypatch.setattr(environment, "run", None)
        devices = local_devices("cpu", "python")
        assert devices.environment == told
        assert told["variables"]["ATEN_SET_FOR_A_TEST"] == "1"

    @pytest.mark.slow
    def test_workers_come_from_the_same_server(self):
        preload = local_devices("cpu", "python").preload
        before = WORKERS.pid
        LocalExecutor(preload=preload).start(target="sweep_targets:run_model")
        assert (preload, before) == (preload_for("python"), WORKERS.pid)

    @pytest.mark.slow
    def test_its_errors_are_told_as_they_are(self):
        with pytest.raises(HashbenchError, match="invalid tracer"):
            local_devices("cpu", "none")

    @pytest.mark.parametrize("target", ["os:abort", "os:getcwd", "no_such_module:told"])
    def test_a_fork_that_cannot_tell_gives_nothing(self, target):
        arguments = ("too", "many") if target == "os:getcwd" else ()
        assert answer_of_a_fork(target, *arguments, environment=os.environ, preload=()) == ""

    def test_no_server_is_no_error(self, monkeypatch):
        def fork(*_, **__):
            raise HashbenchError("cannot start a worker process")

        monkeypatch.setattr(WORKERS, "fork", fork)
        assert answer_of_a_fork("os:getcwd", environment=os.environ) == ""

    @pytest.mark.slow
    def test_a_new_python_tells_where_no_fork_does(self):
        asked = []
        told = environment.collect_in_child(
            device="cpu", variables={}, tracer="python", by=lambda *words, **_: asked.append(words) or ""
        )
        assert asked == [("hashbench.core.run.environment:described", "cpu", "python", "")]
        assert told["tracer"] == "python"


@pytest.mark.parametrize("variable", [SERVER_VARIABLE, POOL_VARIABLE])
def test_a_worker_asks_the_servers_of_its_own_sweep_though_its_fork_server_is_older(variable, tmp_path, monkeypatch):
    asked = []
    for number, server in enumerate((None, "/one", "/other", None)):
        if server is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, server)
        rows = sweep([spec("a", "asks", arguments={"variable": variable})], tmp_path / str(number) / "results").rows
        asked += [row.detail for row in rows]
    assert asked == ["asks nobody", "asks /one", "asks /other", "asks nobody"]


ZOO = """
import multiprocessing, os, pathlib, signal, time
from concurrent.futures import ProcessPoolExecutor

HERE = pathlib.Path(__file__).parent

class Numbers:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return float(index)

def square(number):
    return number * number

def wait(name):
    (HERE / name).write_text(str(os.getpid()))
    time.sleep(600)

def model(forward):
    import torch

    class Model(torch.nn.Module):
        def forward(self, x):
            return x + forward()

    return Model(), (torch.zeros(2),)

def loader():
    import torch

    loaded = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1)
    assert multiprocessing.get_start_method() == METHOD
    return next(iter(loaded))

def pool(method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as processes:
        return processes.submit(square, 2).result()

def dying(method):
    process = multiprocessing.get_context(method).Process(target=wait, args=(method,), daemon=True)
    process.start()
    while not (HERE / method).exists() or not (HERE / method).read_text():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

METHODS = ("fork", "forkserver", "spawn")
MODELS = {"loader": lambda: model(loader)}
MODELS |= {f"pool {method}": lambda method=method: model(lambda: pool(method)) for method in METHODS}
MODELS |= {f"dying {method}": lambda method=method: model(lambda: dying(method)) for method in METHODS}
"""


@pytest.mark.slow
def test_processes_of_a_models_own_run_as_under_plain_python_and_leave_nobody_behind(tmp_path):
    method = subprocess.check_output(
        [sys.executable, "-c", "import multiprocessing; print(multiprocessing.get_start_method())"], text=True
    )
    (tmp_path / "own_processes.py").write_text(f"METHOD = {method.strip()!r}\n{ZOO}")
    command = [sys.executable, "-m", "hashbench", "sweep", "--suite", "own_processes.py", "--inference"]
    command += ["--iterations", "1", "--output", "results"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    rows = {row.name: row.accuracy for row in read_rows(tmp_path / "results" / "accuracy.csv")}
    expected = {"loader": "pass"} | {f"pool {method}": "pass" for method in METHODS}
    assert rows == expected | {f"dying {method}": "crashed" for method in METHODS}, done.stdout + done.stderr
    wait_until(lambda: not any(alive(int((tmp_path / method).read_text())) for method in METHODS))
    assert "leaked" not in done.stderr
