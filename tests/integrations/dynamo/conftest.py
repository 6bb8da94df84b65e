"""Fixtures: the stand-in for PyTorch's harness, and a harness without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.cli import tools
from hashbench.integrations.dynamo import model_check
from tests.integrations.dynamo.dynamo_helpers import Standin

MINIATURE = """
import glob, json, multiprocessing, os, signal, subprocess, sys, time

class BenchmarkRunner:
    def run_n_iterations(self): ...
    def deepcopy_and_maybe_parallelize(self): ...
    def init_optimizer(self): ...
    def pick_grad(self): ...
    def check_accuracy(self):
        reset_rng_state(), reset_rng_state(), reset_rng_state(), same(), clone_inputs(), self.run_n_iterations()

def main(runner):
    if "--help" in sys.argv:
        sys.exit(0)
    output = next(a.removeprefix("--output=") for a in sys.argv if a.startswith("--output="))
    only = [a.removeprefix("--only=") for a in sys.argv if a.startswith("--only=")]
    if not only:
        for name in ("slow", "killed", "absent"):
            try:
                subprocess.check_call([sys.executable, *sys.argv, f"--only={name}"])
            except subprocess.CalledProcessError as error:
                print("Run failed with return code: ", error.returncode, file=sys.stderr)
        sys.exit(7)
    if only[0] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if only[0] == "spawning":
        (note,) = glob.glob(json.loads(os.environ["HASHBENCH_DYNAMO"])["folder"] + "/notes/*.json")
        before = os.stat(note).st_ino
        worker = multiprocessing.get_context("spawn").Process(target=print)
        worker.start(), worker.join()
        sys.exit(0 if os.stat(note).st_ino == before else 8)
    if only[0] == "interrupted":
        with open(json.loads(os.environ["HASHBENCH_DYNAMO"])["folder"] + "/machine.json", "w") as file:
            json.dump({"key": "e1"}, file)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        open(os.environ["READY"], "w").close()
        signal.sigwait([signal.SIGINT])
        sys.exit(6 if signal.sigtimedwait([signal.SIGINT], 0.5) is None else 9)
    while only[0] == "slow" and "WAIT_FOR" in os.environ and not os.path.exists(os.environ["WAIT_FOR"]):
        time.sleep(0.01)
    if only[0] == "slow":
        with open(output, "w") as file:
            file.write("dev,name,batch_size,accuracy\\ncpu,slow,0,timeout\\n")
"""


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is not described, which would start a process that imports torch."""
    monkeypatch.setattr(tools, "_write_environment", lambda _: "")


@pytest.fixture
def miniature(tmp_path: Path, no_environment: None) -> Path:  # noqa: ARG001
    """A harness without torch: its parts have the right names, and one of its children is killed."""
    folder = tmp_path / "miniature"
    folder.mkdir()
    (folder / "common.py").write_text(MINIATURE)
    (folder / "zoo.py").write_text(
        "from common import BenchmarkRunner, main\nif __name__ == '__main__':\n    main(BenchmarkRunner())\n"
    )
    return folder / "zoo.py"


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    """The harness has a process for each model: its age counts against ``--timeout``, a test process's must not."""
    monkeypatch.setattr(model_check, "_age", lambda: 1.0)
    return Standin(tmp_path / "csv", monkeypatch)
