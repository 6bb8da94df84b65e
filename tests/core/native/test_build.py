"""The native library comes to the user: compiled once, kept where nobody else can write, never loaded half written."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_helpers import Main
from sweep_helpers import alive, wait_until

from hashbench.core.native import build as building
from hashbench.core.native.build import Built, Unavailable, build
from hashbench.core.native.library import NATIVE_KEY
from hashbench.core.processes import Child, Finished, phases_told_to
from hashbench.core.trace.tracer import native_unavailable
from tests.core.native.build_helpers import COPIES, FakeCompiler, built, reason

FAILS = 'echo "In file included from x:" >&2; echo "$source:3:7: error: no member named y" >&2; exit 1'


# ------------------------------------------------------------------------------------------------ compiled, found


@pytest.mark.skipif(not any(map(shutil.which, building.COMPILERS)), reason="there is no C++ compiler here")
def test_a_compiler_of_this_machine_makes_a_library_that_loads(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert ctypes.CDLL(str(built(build(cache=folder, source=source)))).answer() == 42


@pytest.mark.skipif(not any(map(shutil.which, building.COMPILERS)), reason="there is no C++ compiler here")
def test_headers_are_compiled_and_named_in_errors(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    source.write_text('#include "part.h"\nextern "C" int answer() { return part(); }\n')
    header = source.with_name("part.h")
    header.write_text("#pragma once\nint part() { return 43; }\n")
    assert ctypes.CDLL(str(built(build(cache=folder, source=source)))).answer() == 43
    header.write_text("#pragma once\nint part() { return nothing; }\n")
    assert re.search(r": part\.h:2:\d+: error: .*nothing", reason(build(cache=folder, source=source)))


def test_it_is_compiled_once(source: Path, folder: Path, compiler: FakeCompiler) -> None:
    told: list[str] = []
    with phases_told_to(told.append):
        first = built(build(cache=folder, source=source))
        assert first.read_bytes() == source.read_bytes()
        assert built(build(cache=folder, source=source)) == first
    assert told == ["compiling the native tracer, once for this torch"]
    assert len(compiler.started) == 1
    assert {path.name for path in folder.iterdir()} == {first.name, ".lock"}


def test_cached_library_needs_no_compiler(
    source: Path, folder: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built(build(cache=folder, source=source))
    compiler.program.unlink()
    monkeypatch.setenv("PATH", "")
    assert built(build(cache=folder, source=source)) == path


@pytest.mark.parametrize(
    "what", ["source", "header", "version", "commit", "abi", "machine", "python", "libc", "libstdc++", "headers"]
)
def test_another_makes_another_library(
    what: str, source: Path, folder: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built(build(cache=folder, source=source))
    changes: dict[str, Callable[[], object]] = {
        "source": lambda: source.write_text("int other;"),
        "header": lambda: source.with_name("part.h").write_text("int other;"),
        "version": lambda: monkeypatch.setattr(torch, "__version__", "9.9.0"),
        "commit": lambda: monkeypatch.setattr(torch.version, "git_version", "0123"),
        "abi": lambda: monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: False),
        "machine": lambda: monkeypatch.setattr(building.platform, "machine", lambda: "riscv64"),
        "python": lambda: monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399"),
        "libc": lambda: monkeypatch.setattr(os, "confstr", lambda _: "glibc 9.9"),
        "libstdc++": lambda: monkeypatch.setattr(building, "_cpp_library", lambda: "libstdc++.so.9"),
        "headers": lambda: monkeypatch.setattr(torch, "__file__", str(other_torch(source.parent))),
    }
    changes[what]()
    second = built(build(cache=folder, source=source))
    assert second != first
    assert first.exists()
    assert len(compiler.started) == 2


def other_torch(parent: Path) -> Path:
    """A checkout of torch that is built again after its headers have changed, under the same version and commit."""
    for name in ("lib/libc10.so", "lib/libtorch_cpu.so", "include/torch/library.h"):
        (parent / "torch" / name).parent.mkdir(parents=True, exist_ok=True)
        (parent / "torch" / name).write_text("built again")
    return parent / "torch" / "__init__.py"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, building.COMPILERS)), reason="there is no C++ compiler here")
def test_the_recorder_compiles_and_loads_beside_this_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    path = built(build(cache=folder))
    code = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


STEP = f"""
import torch
from hashbench import HashDebugTrace
from hashbench.core.trace import file
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
with HashDebugTrace(model=model, tracer="native") as trace:
    model(torch.rand(2, 3)).mean().backward()
    optimizer.step()
trace.add_result("weight", model[0].weight)
print(torch._C._dispatch_has_kernel_for_dispatch_key("aten::relu", "{NATIVE_KEY}"))
print(file.dumps(trace.finish()))
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(native_unavailable()), reason="the native tracer cannot be built here")
def test_recorder_without_unboxed_kernels_records_the_same(folder: Path) -> None:
    variables = (("HASHBENCH_CXXFLAGS", "-DHASHBENCH_ONLY_BOXED"), ("HASHBENCH_CACHE", str(folder)))
    unboxed, boxed = (
        subprocess.run(
            [sys.executable, "-c", STEP], env={**os.environ, **more}, capture_output=True, text=True, check=True
        ).stdout.split("\n", 1)
        for more in ({}, dict(variables))
    )
    assert (unboxed[0], boxed[0]) == ("True", "False")
    assert unboxed[1] == boxed[1]
    assert "aten.addmm.default" in boxed[1]


# ---------------------------------------------------------------------------------------------- several processes


def _build_in_child(folder: Path, source: Path, asked: Path) -> None:
    asked.touch()
    built(build(cache=folder, source=source))


def test_concurrent_processes_share_one_compilation(source: Path, folder: Path, compiler: FakeCompiler) -> None:
    begun, go = source.parent / "begun", source.parent / "go"
    compiler.does(f"touch {begun}; while [ ! -e {go} ]; do sleep 0.02; done; {COPIES}")
    asked = [source.parent / f"asked{number}" for number in range(3)]
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_build_in_child, args=(folder, source, note)) for note in asked]
    for child in children:
        child.start()
    wait_until(lambda: begun.exists() and all(note.exists() for note in asked))
    assert list(folder.glob("*.so")) == []  # nothing is seen of what is not finished
    go.touch()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert len(compiler.started) == 1
    assert build(cache=folder, source=source) == Built(next(folder.glob("*.so")))


# ------------------------------------------------------------------------------------------------- damaged files


# ---------------------------------------------------------------------------------------------------- compilers


def test_without_a_compiler_a_sentence_says_what_to_do(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(source.parent))
    assert reason(build(cache=folder, source=source)) == (
        "there is no C++ compiler (c++, g++, clang++); install one, or name it in $CXX"
    )
    assert not folder.exists()


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ("no-such-compiler", "there is no C++ compiler named 'no-such-compiler' by $CXX"),
        ("'unclosed", '$CXX is "\'unclosed" (No closing quotation)'),
    ],
)
def test_what_cxx_names_must_be_there(
    named: str, what: str, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", named)
    found = build(cache=folder, source=source)
    assert found == Unavailable(what, "install one, or name it in $CXX")


def test_cxx_may_hold_arguments(
    source: Path, folder: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.does('[ "$wrapped" ] && ' + COPIES)
    monkeypatch.setenv("CXX", f"env wrapped=yes '{compiler.program}'")
    assert built(build(cache=folder, source=source)).exists()


def test_failure_reports_first_error_and_is_remembered(source: Path, folder: Path, compiler: FakeCompiler) -> None:
    compiler.does(FAILS)
    said = reason(build(cache=folder, source=source))
    assert said == (
        f"the native recorder cannot be built ('{compiler.program}': answer.cpp:3:7: error: no member named y); "
        "name another compiler in $CXX; `hashbench native` tries again"
    )
    assert reason(build(cache=folder, source=source)) == said
    assert len(compiler.started) == 1
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".failed"]


def test_failure_is_retried_on_request_or_change(source: Path, folder: Path, compiler: FakeCompiler) -> None:
    compiler.does(FAILS)
    reason(build(cache=folder, source=source))
    reason(build(cache=folder, source=source, retry=True))
    assert len(compiler.started) == 2
    (note,) = folder.glob("*.failed")
    os.utime(note, (0, 0))  # long ago
    reason(build(cache=folder, source=source))
    assert len(compiler.started) == 3
    note.write_text("{")  # half written
    reason(build(cache=folder, source=source))
    assert len(compiler.started) == 4
    compiler.does(COPIES)  # another version of it
    built(build(cache=folder, source=source))
    assert list(folder.glob("*.failed")) == []


def test_next_compiler_is_tried_if_first_fails(
    source: Path, folder: Path, compiler: FakeCompiler, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private / "bin").mkdir()
    newer = FakeCompiler(private / "bin")
    compiler.does(FAILS)
    for name, program in (("c++", compiler.program), ("g++", compiler.program), ("clang++", newer.program)):
        (private / "bin" / name).symlink_to(program)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", f"{private / 'bin'}:/bin:/usr/bin")
    assert built(build(cache=folder, source=source)).exists()
    assert (len(compiler.started), len(newer.started)) == (1, 1)  # g++ is the same program as c++


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("exit 0", "it wrote no library"),
        ("echo only words >&2; exit 3", "only words"),
        ("exit 3", "exit code 3"),
        ("kill -KILL $$", "exit code -9"),
    ],
)
def test_a_compiler_that_makes_no_library(
    body: str, said: str, source: Path, folder: Path, compiler: FakeCompiler
) -> None:
    compiler.does(body)
    assert f": {said})" in reason(build(cache=folder, source=source))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("print('first\\nit counts wrong', file=sys.stderr); return 1", "it counts wrong"),
        ("time.sleep(600)", "not finished after 0.5 s"),
    ],
)
def test_library_failing_its_trial_is_discarded(
    code: str, said: str, source: Path, folder: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = set_trial(source.parent, code, monkeypatch)
    if "sleep" in code:
        monkeypatch.setattr(building, "TRIAL_SECONDS", 0.5)
    what = f"its library does not work with torch {torch.__version__}: {said})"
    assert what in reason(build(cache=folder, source=source, trial=trial))
    assert what in reason(build(cache=folder, source=source, trial=trial))
    assert len(compiler.started) == 1
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".failed"]


def test_a_library_is_tried_once_before_others_see_it(
    source: Path, folder: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = source.parent / "tried"
    code = f"open({str(note)!r}, 'a').write(path + chr(10) + open(path).read()); return 0"
    trial = set_trial(source.parent, code, monkeypatch)
    path = built(build(cache=folder, source=source, trial=trial))
    assert built(build(cache=folder, source=source, trial=trial)) == path
    tried, content = note.read_text().split("\n", 1)
    assert Path(tried).parent.parent == folder
    assert content == source.read_text()
    assert len(compiler.started) == 1


def set_trial(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trial whose fresh Python need not import torch."""
    (folder / "trials.py").write_text(f"import os, signal, sys, time\n\ndef begin(path):\n    {code}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "trials:begin"


def test_a_compiler_that_cannot_be_started(source: Path, folder: Path, compiler: FakeCompiler) -> None:
    compiler.program.write_bytes(b"\x7fELF of another machine")
    assert "it cannot be started: Exec format error" in reason(build(cache=folder, source=source))


def test_hanging_compiler_is_killed_with_children(
    source: Path, folder: Path, compiler: FakeCompiler, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = private / "started"
    compiler.does(f"touch $TMPDIR/left; sleep 600 & echo $! > {note}.tmp; mv {note}.tmp {note}; wait")
    monkeypatch.setattr(building, "run", lambda *given, **more: run_until(note, *given, **more))
    assert "it had not finished after 300 s" in reason(build(cache=folder, source=source))
    assert "it had not finished after 300 s" in reason(build(cache=folder, source=source))
    assert len(compiler.started) == 1
    wait_until(lambda: not alive(compiler.started[0]) and not alive(int(note.read_text())))
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".failed"]


def run_until(note: Path, command: list[str], *, seconds: float, environment: dict[str, str]) -> Finished:
    """``processes.run`` whose time is over as soon as the compiler has started another process."""
    assert seconds == 300
    with Child(command, environment=environment):
        wait_until(note.exists)
    return Finished(None, "", "")


def test_ctrl_c_ends_the_compiler_and_leaves_nothing(
    source: Path, folder: Path, compiler: FakeCompiler, private: Path
) -> None:
    note = private / "started"
    compiler.does(f"touch $TMPDIR/left; sleep 600 & echo $! > {note}.tmp; mv {note}.tmp {note}; wait")

    def press() -> None:
        wait_until(note.exists)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        build(cache=folder, source=source)
    presses.join()
    wait_until(lambda: not alive(compiler.started[0]) and not alive(int(note.read_text())))
    assert [path.name for path in folder.iterdir()] == [".lock"]
    compiler.does(COPIES)
    assert built(build(cache=folder, source=source)).exists()


# ------------------------------------------------------------------------------------------- folders that do not do


@pytest.mark.usefixtures("compiler")
def test_a_source_or_a_torch_without_headers_says_so(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "missing.cpp cannot be read" in reason(build(cache=folder, source=source.with_name("missing.cpp")))
    torch_without = other_torch(source.parent)
    (torch_without.parent / "include" / "torch" / "library.h").unlink()
    monkeypatch.setattr(torch, "__file__", str(torch_without))
    assert "library.h cannot be read (No such file or directory)" in reason(build(cache=folder, source=source))


# ----------------------------------------------------------------------------------------------- hashbench native


def test_the_command_compiles_it_and_says_where_it_is(
    places: tuple[Path, Path], compiler: FakeCompiler, source: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building.build, "__kwdefaults__", {**building.build.__kwdefaults__, "source": source})
    monkeypatch.setattr(building, "TRIAL", "")  # what is compiled here records nothing
    compiler.does(FAILS)
    reason(build())
    said = main("native", cwd=source.parent)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        f"hashbench: the native recorder cannot be built ('{compiler.program}': answer.cpp:3:7: error: no member "
        "named y): the Python tracer is used. Name another compiler in $CXX; `hashbench native` tries again.\n"
    )
    assert len(compiler.started) == 2  # what failed before was tried again
    compiler.does(COPIES)
    places[0].chmod(0o777)
    said = main("native", cwd=source.parent)
    assert (said.returncode, said.stderr) == (0, "")
    (path,) = places[1].glob("*.so")
    note = f"{places[0]} can be written by other users, who could put any code there"
    assert said.stdout == f"native tracer: {path} ({note})\n"
