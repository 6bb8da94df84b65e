"""Folders of a repro that somebody made to harm: nothing of theirs is run, and the disk is as it was."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from command_helpers import Main
from repro_helpers import aten, captured, document_in, said_of, signed_again

from hashbench.core.diagnose.calls import ops
from hashbench.core.diagnose.repro import write_repro
from hashbench.core.io import read_file

HARM = "open('harmed', 'w').close()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repro, and beside it a file that a hostile one would change."""
    call = captured(aten.addmv.default, torch.zeros(3), torch.ones(3, 3), torch.ones(3))
    write_repro(tmp_path / "repro", call, said_of())
    (tmp_path / "precious").write_bytes(b"precious")
    return tmp_path / "repro"


def tree(root: Path) -> dict[str, tuple[int, int, str]]:
    """Every path with what kind it is, its size, and its content."""
    found = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        small = path.is_file() and not path.is_symlink() and about.st_size < 2**30
        content = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
        found[str(path.relative_to(root))] = (about.st_mode, about.st_size, content)
    return found


def inherited() -> dict[str, str]:
    """The environment variables that decide what a child process loads."""
    return {name: value for name, value in os.environ.items() if name.startswith(("LD_", "PYTHON", "TORCH"))}


def calling(op: str, *args: object, **kwargs: object) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        document = document_in(folder)
        document.update(op=op, args=list(args), kwargs=kwargs)
        signed_again(folder, document)

    return forge


def changed(**fields: object) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        signed_again(folder, {**document_in(folder), **fields})

    return forge


def in_place_of(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return forge


def bomb(path: Path) -> None:
    """An archive like torch's of which a member is 2000 times as large as the file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tensors/data/0", bytes(64 * 2**20))
    signed_again(path.parent, document_in(path.parent))


def legacy(path: Path) -> None:
    """A pickle of torch's older format, whose sizes are believed before its bytes are read."""
    torch.save({"memories": [torch.zeros(4)]}, path, _use_new_zipfile_serialization=False)
    signed_again(path.parent, document_in(path.parent))


def sparse_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def modules(folder: Path) -> None:
    """Modules and libraries where Python, the loader of libraries and hashbench might look for some."""
    for name in ("torch", "numpy", "sitecustomize", "hashbench", "ops", "evil", "repro"):
        (folder / f"{name}.py").write_text(HARM)
    recorded = {**document_in(folder)["recorded"], "definition": "module evil, file evil.py"}
    environment = {**recorded["environment"], "LD_PRELOAD": "./evil.so", "PYTHONPATH": "."}
    settings = {**document_in(folder)["settings"], "LD_PRELOAD": "./evil.so", "TORCH_LIBRARY": "evil"}
    changed(recorded={**recorded, "environment": environment}, settings=settings, op="evil.run.default")(folder)


FILES = {
    "an op that creates a file": (calling("aten.from_file.default", "made", shared=True, size=100), "may name a file"),
    "an op that lengthens a file": (
        calling("aten.from_file.out", "../precious", shared=True, size=100, out={"tensor": 0}),
        "may name a file",
    ),
    "an op of TorchScript's that writes": (calling("aten.save.default", {"tensor": 0}, "made"), "not an op"),
    "an op that prints": (calling("aten._print.default", "\x1b]0;owned\x07"), "may name a file"),
    "an op that waits for other processes": (
        calling("_c10d_functional.all_reduce.default", {"tensor": 0}, "sum", "0"),
        "works with other processes",
    ),
    "an attribute of an op": (calling("aten.__class__.mro"), "does not exist"),
    "the function that loads libraries": (calling("torch.load_library.default", "./evil.so"), "does not exist"),
    "a path of attributes": (calling("aten.add.__globals__"), "not an overload"),
    "a name with a path in it": (calling("../../evil"), "is not the name of an op"),
    "modules and libraries where they might be found": (modules, "the op evil.run.default does not exist"),
    "a FIFO for the call": (in_place_of("call.json", os.mkfifo), "not a regular file"),
    "a FIFO for the tensors": (in_place_of("tensors.pt", os.mkfifo), "not a regular file"),
    "a link to a device without end": (
        in_place_of("tensors.pt", lambda path: path.symlink_to("/dev/zero")),
        "not a regular file",
    ),
    "a link to itself": (in_place_of("call.json", lambda path: path.symlink_to("call.json")), "symbolic links"),
    "a link to another's file": (in_place_of("call.json", lambda path: path.symlink_to("../precious")), "not JSON"),
    "a file of a TiB": (in_place_of("call.json", sparse_file), "more than 512 MiB"),
    "brackets without end": (lambda folder: (folder / "call.json").write_bytes(b"[" * 10**6), "not JSON"),
    "an archive that unpacks to more": (in_place_of("tensors.pt", bomb), "are compressed or overlap"),
    "a pickle of torch's older format": (in_place_of("tensors.pt", legacy), "holds more than tensors, or is damaged"),
    "tensors larger than memory": (
        changed(memories=[{"bytes": 2**60, "alignment": 0, "device": "cpu"}] * 3),
        "another size in tensors.pt",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("forge", "words"), FILES.values(), ids=FILES)
def test_nothing_of_a_hostile_folder_is_run(
    forge: Callable[[Path], object], words: str, folder: Path, main: Main
) -> None:
    forge(folder)
    before, loaded, variables = tree(folder.parent), set(sys.modules), inherited()
    libraries = set(torch.ops.loaded_libraries)
    done = main("replay", ".", "--replays", "2", "--budget", "1", cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr
    assert "nothing was run" in done.stderr
    assert "\x1b" not in done.stderr
    assert tree(folder.parent) == before
    assert (set(torch.ops.loaded_libraries), inherited()) == (libraries, variables)
    assert "evil" not in set(sys.modules) - loaded


@pytest.mark.slow
def test_the_refusal_of_an_op_says_what_to_do(folder: Path, main: Main) -> None:
    calling("aten.from_file.default", "made", shared=True, size=100)(folder)
    said = main("replay", folder, cwd=folder.parent).stderr
    assert said.startswith("hashbench: cannot use the repro in ")
    assert "nothing was run (aten.from_file.default takes a text that may name a file" in said
    assert said.endswith("Do not trust this folder, nor its repro.py: no sweep writes the repro of such a call.\n")


@pytest.mark.slow
def test_a_custom_op_gets_no_path(folder: Path, main: Main) -> None:
    source = folder.parent / "own.py"
    source.write_text(
        "import torch\n"
        "@torch.library.custom_op('hashbench_hostile::scaled', mutates_args=())\n"
        "def scaled(x: torch.Tensor, mode: str) -> torch.Tensor:\n"
        "    open(mode, 'w').close()\n"
        "    return x * 2\n"
    )
    (folder / "repro.py").write_text(HARM)
    ops.load(str(source))
    calling("hashbench_hostile.scaled.default", {"tensor": 0}, str(folder / "harmed"))(folder)
    before = tree(folder.parent)
    done = main("replay", folder, "--import", source, cwd=folder.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert "which reads as the path of a file, and only ops that compute on tensors are replayed" in done.stderr
    assert tree(folder.parent) == before


POOL = (aten.max_pool2d_with_indices_backward.default, ([2, 2], [2, 2], [0, 0], [1, 1], False))


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2**40])
def test_an_op_that_checks_no_numbers_is_refused(place: int, tmp_path: Path, main: Main) -> None:
    """The folder is written, since its call was captured here, and its own script runs."""
    func, options = POOL
    indices = torch.zeros(1, 1, 2, 2, dtype=torch.int64)
    call = captured(func, torch.ones(1, 1, 2, 2), torch.ones(1, 1, 4, 4), *options, indices)
    write_repro(tmp_path / "repro", call, said_of(op=call.op))
    if place:
        found = document_in(tmp_path / "repro")
        content = torch.load(tmp_path / "repro" / "tensors.pt", weights_only=True)
        (memory,) = [each for each in content["memories"] if each.numel() == 32]
        memory.view(torch.int64).fill_(place)
        torch.save(content, tmp_path / "repro" / "tensors.pt")
        signed_again(tmp_path / "repro", found)
    done = main("replay", "repro", "--replays", "2", "--budget", "5", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "max_pool2d_with_indices_backward.default does not check its indices" in done.stderr
    assert "If you trust the folder, run its repro.py." in done.stderr


CRASHES = """
import ctypes, os, torch
@torch.library.custom_op("hashbench_crash::ends", mutates_args=())
def ends(x: torch.Tensor, how: int) -> torch.Tensor:
    print("a kernel prints", flush=True)
    if how == 1:
        ctypes.string_at(8)
    if how == 2:
        os.write(2, b"free(): invalid pointer\\n")
        os.abort()
    if how == 3:
        os._exit(7)
    return x * 2
"""
ENDS = {
    1: "killed by SIGSEGV",
    2: "killed by SIGABRT (free(): invalid pointer)",
    3: "ended with exit code 7 and no result",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [0, *ENDS])
def test_a_crash_is_one_line_and_its_near_twin_is_replayed(how: int, tmp_path: Path, main: Main) -> None:
    (tmp_path / "own.py").write_text(CRASHES)
    ops.load(str(tmp_path / "own.py"))
    call = captured(torch.ops.hashbench_crash.ends.default, torch.ones(3), 0)
    write_repro(tmp_path / "repro", call, said_of(op=call.op))
    calling("hashbench_crash.ends.default", {"tensor": 0}, how)(tmp_path / "repro")
    done = main("replay", "repro", "--import", "own.py", "--replays", "2", "--budget", "5", cwd=tmp_path)
    assert "a kernel prints" in done.stdout
    if not how:
        assert (done.returncode, done.stderr) == (0, "")
        assert "hashbench_crash.ends.default" in done.stdout
        return
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"the process that replayed repro has no result: {ENDS[how]}. The folder is" in done.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_replay_and_its_child(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        CRASHES.replace("    if how == 1:\n", "    import time; time.sleep(600)\n    if how == 1:\n")
    )
    (tmp_path / "quick.py").write_text(CRASHES)
    ops.load(str(tmp_path / "quick.py"))
    call = captured(torch.ops.hashbench_crash.ends.default, torch.ones(3), 0)
    write_repro(tmp_path / "repro", call, said_of(op=call.op))
    command = [
        sys.executable,
        "-m",
        "hashbench",
        "replay",
        str(tmp_path / "repro"),
        "--import",
        str(tmp_path / "own.py"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a kernel prints\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "hashbench: stopped\n")
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert (len(gone), alive) == (len(family), [])


def test_only_a_shells_pipe_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"passed")
    os.close(writing)
    assert read_file(f"/dev/fd/{reading}") == b"passed"
    os.close(reading)
    (tmp_path / "large").write_bytes(bytes(2**20 + 1))
    with pytest.raises(OSError, match="large has more than 1 MiB"):
        read_file(tmp_path / "large", most=2**20)


def observations(folder: Path) -> Path:
    """A recording whose file of tensors says of itself that it holds 4 EiB."""
    from hashbench.core.records import OpRecord
    from hashbench.tools.observer import files
    from hashbench.tools.observer.recording import Observation, Recording, Saved

    one = Observation("x_1", OpRecord("x", "forward", 0, "", "x"), (Saved(0, "float32", (2,), "cpu"),))
    path = files.path_of(folder, "run")
    files.write(path, Recording("run", (one,)), [torch.zeros(2)])
    (tensors,) = folder.glob("*.safetensors")
    header = json.dumps({"0": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    tensors.unlink()
    document: dict[str, Any] = json.loads(path.read_text())
    digest = hashlib.sha256(content).hexdigest()
    (folder / f"run.{digest[:16]}.safetensors").write_bytes(content)
    rest = {key: value for key, value in document.items() if key != "sha256"} | {"tensors": digest}
    sha256 = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**rest, "sha256": sha256}))
    return path


def test_sizes_that_tensors_claim_are_not_believed(tmp_path: Path) -> None:
    from hashbench.core.errors import HashbenchError
    from hashbench.tools.observer import files

    with pytest.raises(HashbenchError, match="cannot be read"):
        files.read_reference(observations(tmp_path))


@pytest.mark.parametrize("kind", ["trace", "sweep", "rows", "audit", "check", "observations", "zoo"])
def test_a_fifo_in_the_place_of_any_file_is_refused_at_once(kind: str, tmp_path: Path, main: Main) -> None:
    from hashbench.core.errors import HashbenchError
    from hashbench.tools.observer import files

    for name in ("a.log", "accuracy.csv", "audit.csv", "check.json", "zoo.csv", "run.json"):
        os.mkfifo(tmp_path / name)
    if kind == "observations":
        with pytest.raises(HashbenchError, match="not a regular file"):
            files.read(tmp_path / "run.json")
        return
    commands = {
        "trace": ("diff", "a.log", "a.log"),
        "sweep": ("report", "."),
        "rows": ("compare", "accuracy.csv", "accuracy.csv"),
        "audit": ("compare", "audit.csv", "audit.csv"),
        "check": ("pipeline", "compare", ".", "."),
        "zoo": ("list", "--suite", "zoo.csv"),
    }
    done = main(*commands[kind], cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
