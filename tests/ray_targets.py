"""Stand-ins for ``hashbench.core.check.model:run_model`` on the machines of a cluster, and a sweep of them.

As in ``sweep_targets``, some of whose functions are here too, a model does what its name's function below does; what a
test wants to see goes into the folder ``notes`` that its arguments name, since its results folder lies on the machine
where it runs.

Run as a script, this file is a sweep in a process of its own: ``python ray_targets.py OUTPUT ADDRESS NAME=BEHAVIOUR…``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil
from sweep_targets import FOR_EVER, do_hang, do_kill9, do_nap, do_segfault, do_segfault_in_diagnosis  # noqa: F401 – by name

from hashbench.core.io import replace_file
from hashbench.core.processes import tell_phase
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.results.folder import file_key
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.document import Fingerprints, ModelFingerprint


def spec(name: str, do: str = "pass", *, notes: Path) -> ModelSpec:
    """A model that behaves as the function ``do`` below."""
    return ModelSpec(suite="fake", name=name, arguments={"do": do, "notes": str(notes)}, input_shape=(3, 4))


def run_model(spec: ModelSpec, options: RunOptions) -> Row:
    """Note that this model ran, and do what it says."""
    notes = Path(spec.arguments["notes"])
    process = f"{os.getpid()}:{psutil.Process().create_time()}"
    with (notes / "ran.txt").open("a") as ran:
        ran.write(f"{spec.name} {process} {os.environ['RAY_RAYLET_PID']} {options.output}\n")
    note = globals()[f"do_{spec.arguments['do']}"](spec, options) or ""
    return Row(options.device, spec.name, 2, "pass", suite=spec.suite, mode=options.mode, detail=note, seconds=0.0)


def times_run(notes: Path) -> Counter[str]:
    """How often each model began."""
    return Counter(name for name, *_ in _noted(notes))


def workers(notes: Path) -> list[int]:
    """The process ids of all models that began."""
    return [int(process.partition(":")[0]) for _, process, *_ in _noted(notes)]


def lives_on(notes: Path) -> bool:
    """Whether the process of any model is not over; another one may have got its number since."""
    for _, process, *_ in _noted(notes):
        pid, _, created = process.partition(":")
        with contextlib.suppress(psutil.NoSuchProcess):
            there = psutil.Process(int(pid))
            if there.create_time() == float(created) and there.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def machines(notes: Path) -> dict[str, int]:
    """Where each model began last: the process id of the machine's raylet."""
    return {name: int(raylet) for name, _, raylet, _ in _noted(notes)}


def temporary_folders(notes: Path) -> list[Path]:
    """What every attempt had on its machine for its results."""
    return [Path(folder).parent for *_, folder in _noted(notes)]


def fingerprint(*, device: str, variables: Mapping[str, str], tracer: str) -> dict[str, object]:
    """In the place of an environment: which of the machines of the test this is."""
    return {
        "key": f"machine-{os.environ['RAY_RAYLET_PID']}",
        "device": device,
        "variables": dict(variables),
        "tracer": tracer,
    }


def _noted(notes: Path) -> list[list[str]]:
    path = notes / "ran.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def do_pass(spec, options):
    return f"threads {options.threads}, OpenMP {os.environ['OMP_NUM_THREADS']}, shape {spec.input_shape}"


def do_hang_with_children(spec, _options):
    """A child in the worker's group, and one that went its own way."""
    children = [subprocess.Popen(["sleep", str(FOR_EVER)], start_new_session=own) for own in (False, True)]
    replace_file(Path(spec.arguments["notes"]) / "children.txt", " ".join(str(child.pid) for child in children))
    time.sleep(FOR_EVER)


def do_leave_files(spec, options):
    """What the runner leaves beside a row."""
    print("from the model")
    key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
    (Path(options.output) / "traces" / f"{key}.run1.log").write_text("a trace\n")
    repro = Path(options.output) / "repro" / key
    repro.mkdir(parents=True)
    (repro / "tensors.pt").write_bytes(bytes(range(256)))


def do_fingerprint(spec, options):
    """What ``record_model`` leaves: a file of fingerprints."""
    model = ModelFingerprint(spec.suite, spec.name, options.mode, "cpu", "", "on", options.threads, (), (), {})
    document.write(document.path_in(Path(options.output), model.key), Fingerprints({}, (model,)))


def do_tell(spec, _options):
    """Say what it is doing, until the test has heard of it."""
    tell_phase("slot_memory: run 2")
    while not Path(spec.arguments["notes"], "heard").exists():
        time.sleep(0.05)


def do_lose_the_machine_once(spec, _options):
    """Wait for the test to kill the machine; on the next one, pass."""
    if times_run(Path(spec.arguments["notes"]))[spec.name] == 1:
        time.sleep(FOR_EVER)


def do_take_the_machine_along_once(spec, _options):
    """As a machine does that goes down, all of whose processes are killed; on the next one, pass."""
    if times_run(Path(spec.arguments["notes"]))[spec.name] == 1:
        os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
        do_kill9()


def do_stop_ray_worker_once(spec, _options):
    """The process that asked for this one answers no more; on the next one, pass."""
    import psutil

    if times_run(Path(spec.arguments["notes"]))[spec.name] == 1:
        psutil.Process(psutil.Process().ppid()).parent().suspend()


def do_kill_ray_worker(*_):
    """End the process that asked for this one, as an operating system short of memory may."""
    import psutil

    psutil.Process(psutil.Process().ppid()).parent().kill()
    time.sleep(FOR_EVER)


def executor(address: str, **asked):
    """One whose machines do without torch."""
    from hashbench.core.sweep.executors import RayCluster
    from hashbench.extensions.ray.executor import RayExecutor

    return RayExecutor((), RunOptions(), cluster=RayCluster(address, **asked), fingerprint="ray_targets:fingerprint")


def main(arguments: list[str]) -> int:
    from hashbench.core.sweep.run import SweepInterrupted, run_sweep

    output, address = Path(arguments[0]), arguments[1]
    models = [spec(*argument.split("="), notes=output.parent) for argument in arguments[2:]]
    try:
        run_sweep(
            models,
            RunOptions(),
            output=output,
            environment={"key": "driver"},
            target="ray_targets:run_model",
            executor=executor(address),
        )
    except SweepInterrupted as interrupted:
        print(interrupted)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


def serve_an_older_ray(address: str) -> None:
    """What a machine with an older Ray has to say when it joins the cluster."""
    import ray

    from hashbench.extensions.ray.client import serve

    ray.__version__ = "1.0"
    serve(address)
