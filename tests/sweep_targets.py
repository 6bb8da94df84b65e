"""Stand-ins for ``hashbench.core.check.model:run_model``, without torch, that end in every way a model can end.

Run as a script, this file is a sweep in a process of its own:
``python sweep_targets.py OUTPUT [--resume] [--jobs N] [--preload MODULE] NAME=BEHAVIOUR…``; exit code 130 for Ctrl-C.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import psutil

from hashbench.core.io import replace_file
from hashbench.core.processes import send_draft, tell_phase
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.results.folder import ResultsFolder, file_key
from hashbench.core.results.rows import row_to_json

LOADED_IN = os.getpid()

FOR_EVER = 600
"""Seconds that nothing here lasts which is to be ended: longer than any test waits."""


def spec(name: str, do: str = "pass", **fields) -> ModelSpec:
    """A model that behaves as the function ``do`` below."""
    arguments = {"do": do, **fields.pop("arguments", {})}
    return ModelSpec(suite="fake", name=name, arguments=arguments, **fields)


def run_model(spec: ModelSpec, options: RunOptions) -> Row:
    """Note that this model ran, and do what it says."""
    with (Path(options.output).parent / "ran.txt").open("a") as ran:
        ran.write(f"{spec.name} {os.getpid()}\n")
    began = time.monotonic()
    outcome = globals()[f"do_{spec.arguments['do']}"](spec, options) or ""
    accuracy, note = outcome if isinstance(outcome, tuple) else ("pass", outcome)
    return Row(
        dev=options.device,
        name=spec.name,
        batch_size=2,
        accuracy=accuracy,
        suite=spec.suite,
        mode=options.mode,
        detail=note,
        seconds=time.monotonic() - began,
    )


def ran(output: Path) -> list[str]:
    """The names of the models that ran beside ``output``, in order of their start."""
    return [line.split()[0] for line in (output.parent / "ran.txt").read_text().splitlines()]


def do_pass(_spec, options):
    return f"loaded in {LOADED_IN}, server {os.getppid()}, threads {options.threads}"


def do_print(*_):
    os.system("echo from a shell")
    print("from Python")


def do_segfault(*_):
    print("about to touch address 0")
    ctypes.string_at(0)


def do_kill9(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_draft(spec, options, **fields):
    """As the runner does before it looks for the cause of a difference."""
    row = Row(options.device, spec.name, 2, "eager_two_runs_differ", suite=spec.suite, mode=options.mode)
    path = ResultsFolder(Path(options.output)).draft_path(file_key(suite=spec.suite, mode=options.mode, name=spec.name))
    replace_file(path, json.dumps(row_to_json(replace(row, **fields))))


def do_segfault_in_diagnosis(spec, options):
    _leave_draft(spec, options, kernel="aten.index_put.default")
    do_segfault()


def do_hang_in_diagnosis(spec, options):
    _leave_draft(spec, options, kernel="aten.index_put.default")
    time.sleep(FOR_EVER)


def do_draft_of_another(spec, options):
    _leave_draft(spec, options, name="another")
    do_segfault()


def do_diagnose(spec, options):
    _leave_draft(spec, options)
    return "diagnosed"


def do_exit3(*_):
    print("giving up")
    os._exit(3)


def do_exit255(*_):
    os._exit(255)


def do_stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def do_hang_once(spec, options):
    """For ever the first time; pass the second."""
    if ran(Path(options.output)).count(spec.name) == 1:
        time.sleep(FOR_EVER)


def do_kill_server(*_):
    """End the fork server, as an operating system short of memory may; this process would go on."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOR_EVER)


def do_differ_and_kill_server(spec, options):
    _leave_draft(spec, options, kernel="aten.index_put.default")
    do_kill_server()


def do_stop_server(spec, options):
    """The first time: the fork server answers no more, and this process ends."""
    if ran(Path(options.output)).count(spec.name) == 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(3)


def do_exit0(*_):
    os._exit(0)


def do_raise(*_):
    raise RuntimeError("the harness itself is broken")


def do_nap(*_):
    time.sleep(0.25)


def do_hang(*_):
    time.sleep(FOR_EVER)


def do_tell(*_):
    tell_phase("slot_memory: run 2")
    time.sleep(FOR_EVER)


def do_hang_with_lock(*_):
    """Holds the interpreter lock, as a native extension can."""
    ctypes.PyDLL(None).sleep(FOR_EVER)


def do_hang_with_children(_spec, options):
    """A child in this group, and one that went its own way; both outlive a plain kill of the worker."""
    children = [subprocess.Popen(["sleep", str(FOR_EVER)], start_new_session=own) for own in (False, True)]
    replace_file(Path(options.output).parent / "children.txt", " ".join(str(child.pid) for child in children))
    time.sleep(FOR_EVER)


def do_leave_thread(*_):
    """Would keep the interpreter from ending."""
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()


def do_leave_child(_spec, options):
    child = subprocess.Popen(["sleep", str(FOR_EVER)])
    replace_file(Path(options.output).parent / "children.txt", str(child.pid))


def do_leave_daemons(_spec, options):
    """Two processes in sessions of their own: a fork of this one, and a program that gets all it can inherit."""
    forked = os.fork()
    if not forked:
        os.setsid()
        time.sleep(FOR_EVER)
        os._exit(0)
    program = subprocess.Popen(["sleep", str(FOR_EVER)], start_new_session=True, close_fds=False)
    replace_file(Path(options.output).parent / "children.txt", f"{forked} {program.pid}")


def do_meet(spec, options):
    """Ends only when another model runs at the same time."""
    here = Path(options.output).parent
    (here / f"{spec.name}.here").touch()
    while len(list(here.glob("*.here"))) < 2:
        time.sleep(0.01)


def _first_time(spec, options) -> bool:
    """Whether this is the first attempt; then it waits for a neighbour to start, too."""
    here = Path(options.output).parent
    mark = here / f"{spec.name}.once"
    if mark.exists():
        return False
    mark.touch()
    while len(ran(Path(options.output))) < 2:
        time.sleep(0.01)
    return True


def _neighbours() -> str:
    commands = [child.cmdline() for child in psutil.Process(os.getppid()).children()]
    forks = [command for command in commands if "hashbench.core.workers:serve" in command]
    return f"beside {len(forks) - 1} others"


def do_die_once(spec, options):
    if _first_time(spec, options):
        do_kill9()
    return _neighbours()


def do_die_once_then_hang(spec, options):
    do_die_once(spec, options)
    time.sleep(FOR_EVER)


def do_out_of_memory_once(spec, options):
    return ("eager_1st_run_OOM", "") if _first_time(spec, options) else _neighbours()


def do_out_of_memory(*_):
    return "eager_1st_run_OOM", ""


def do_differ_and_die_once(spec, options):
    if _first_time(spec, options):
        _leave_draft(spec, options, kernel="aten.index_put.default")
        do_kill9()


def do_differ_and_die_then_die(spec, options):
    do_differ_and_die_once(spec, options)
    do_kill9()


def do_cores(_spec, options):
    return f"cores {sorted(os.sched_getaffinity(0))}, threads {options.threads}"


def do_fill_disk(_spec, options):
    with (Path(options.output).parent / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def do_disk_full(*_):
    Path("/dev/full").write_text("a trace")


def do_signals(*_):
    """What a model would see of how this process came about."""
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return f"blocked {blocked}, SIGINT ignored {ignored}, safe path {os.environ.get('PYTHONSAFEPATH')}"


def do_tell_pipes(spec, options):
    """Beside another model: of multiprocessing's resource tracker, and what else this process has of its server."""
    do_meet(spec, options)
    tracker = resource_tracker._resource_tracker
    open_files = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    sockets = sorted(name for name in open_files if name.startswith("socket:"))
    return f"tracker's inherited {os.get_inheritable(tracker._fd)}, sockets {sockets}"


def do_leave_shared_memory(_spec, options):
    """As a data loader that is killed."""
    left = shared_memory.SharedMemory(create=True, size=16)
    replace_file(Path(options.output).parent / "shared.txt", left.name)
    do_kill9()


def do_asks(spec, _options):
    """Where fresh processes are asked for."""
    return f"asks {os.environ.get(spec.arguments['variable'], 'nobody')}"


def do_leak_descriptors(*_):
    """Take every descriptor that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        while True:
            os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return


def do_mask_files(*_):
    """From here on nobody may read what this process writes, unless as root."""
    os.umask(0o777)


def do_send_draft_and_segfault(spec, options):
    """As the runner does where it cannot write its draft."""
    row = Row(options.device, spec.name, 2, "eager_two_runs_differ", suite=spec.suite, mode=options.mode)
    send_draft(json.dumps(row_to_json(replace(row, kernel="aten.index_put.default"))))
    do_segfault()


def do_fill_quota(*_):
    """From here on this process cannot write files, while its parent can."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def do_torch(*_):
    """Parallel work after the fork; it would hang if the server had started OpenMP threads."""
    preloaded, native = "torch" in sys.modules, sys.modules.get("hashbench.core.trace.native")
    recorder = native is not None and native.load.cache_info().currsize == 1
    threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    import torch

    torch.set_num_threads(2)
    torch.rand(512, 512).exp().sum()
    loaded = f"torch preloaded {preloaded}, recorder {recorder}"
    return f"{loaded}, threads in the server {threads}, in parallel {torch.get_num_threads()}"


def main(arguments: list[str]) -> int:
    from hashbench.core.sweep.executors.local import LocalExecutor
    from hashbench.core.sweep.run import SweepInterrupted, run_sweep

    output = Path(arguments[0])
    jobs = int(arguments[arguments.index("--jobs") + 1]) if "--jobs" in arguments else 1
    preload = arguments[arguments.index("--preload") + 1].split() if "--preload" in arguments else []
    models = [spec(*argument.split("=")) for argument in arguments if "=" in argument]
    try:
        run_sweep(
            models,
            RunOptions(threads=1),  # of one and of two jobs
            output=output,
            environment={},
            resume="--resume" in arguments,
            target="sweep_targets:run_model",
            executor=LocalExecutor(jobs=jobs, preload=preload),
        )
    except SweepInterrupted as interrupted:
        print(interrupted)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
