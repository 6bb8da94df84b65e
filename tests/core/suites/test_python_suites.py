"""A user's own zoo: listed in a child process, built here."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from sweep_helpers import alive, wait_until

from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec
from hashbench.core.suites.python_suites import FileSuite
from hashbench.core.suites.registry import catalog, load

GOOD = """
    import torch
    from hashbench.core.run.workload import Workload
    from neighbour import WIDTH

    class Net(torch.nn.Linear):
        pass

    MODELS = {
        "wide": lambda: (Net(WIDTH, 2), (torch.ones(3, WIDTH),)),
        "full": lambda: Workload(module=Net(2, 2), inputs=(torch.ones(1, 2),), iterations=3),
        "wrong": lambda: [1, 2],
        "no_module": lambda: (len, torch.ones(2)),
        "broken": lambda: 1 / 0,
    }
"""


def write(folder: Path, text: str, name: str = "zoo.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def zoo(tmp_path):
    write(tmp_path, "WIDTH = 5", "neighbour.py")
    return write(tmp_path, GOOD)


def spec_of(path: Path, name: str) -> ModelSpec:
    return ModelSpec(suite=path.stem, source=str(path), name=name)


@pytest.mark.slow
def test_a_zoo_file_is_a_suite_of_its_name_and_knows_where_it_lies(zoo, monkeypatch):
    monkeypatch.chdir(zoo.parent)
    specs = catalog("zoo.py")
    assert [spec.name for spec in specs] == ["broken", "full", "no_module", "wide", "wrong"]
    assert {(spec.suite, spec.source, spec.default) for spec in specs} == {("zoo", str(zoo), True)}


def test_a_pair_and_a_workload_are_built(zoo):
    pair = load(spec_of(zoo, "wide"), mode="training")
    assert pair.module(*pair.inputs).shape == (3, 2)
    assert load(spec_of(zoo, "full"), mode="inference").iterations == 3


def test_a_model_of_a_zoo_file_takes_no_batch_size(zoo):
    with pytest.raises(HashbenchError, match="--batch-size 8 does not apply to wide"):
        load(spec_of(zoo, "wide"), batch_size=8, mode="training")


@pytest.mark.parametrize(("name", "kind"), [("wrong", "list"), ("no_module", "tuple")])
def test_what_a_zoo_function_returns_is_checked(zoo, name, kind):
    with pytest.raises(HashbenchError, match=rf"returned a {kind}.*Return \(module, example_inputs\)"):
        load(spec_of(zoo, name), mode="training")


def test_what_a_zoo_function_raises_comes_through(zoo):
    with pytest.raises(ZeroDivisionError):
        load(spec_of(zoo, "broken"), mode="training")


def test_a_model_that_left_the_file_is_an_error(zoo):
    with pytest.raises(HashbenchError, match="no model is named 'gone'"):
        load(spec_of(zoo, "gone"), mode="training")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("x = 1", "it has no MODELS and no @hashbench.model", id="no MODELS"),
        pytest.param("MODELS = [1]", "its MODELS is a list, not a dict", id="MODELS is a list"),
        pytest.param("MODELS = {}", "its MODELS is empty", id="MODELS is empty"),
        pytest.param("MODELS = {1: print}", "its MODELS has the name 1", id="a name is no string"),
        pytest.param("MODELS = {'a': 1}", "its MODELS['a'] is a int, not a function", id="a value is no function"),
        pytest.param("def f(:", "its import raised SyntaxError: invalid syntax", id="syntax error"),
        pytest.param("raise ValueError('one\\ntwo')", "its import raised ValueError: two", id="exception"),
        pytest.param("import sys; sys.exit('done')", "its import raised SystemExit: done", id="exit"),
        pytest.param("import os; print('bye'); os._exit(3)", "its import ended the process with status 3", id="_exit"),
        pytest.param("import os; os.abort()", "its import was ended by SIGABRT", id="crash"),
    ],
)
def test_a_bad_zoo_file_is_one_line(tmp_path, text, said, capfd):
    with pytest.raises(HashbenchError) as caught:
        catalog(str(write(tmp_path, text)))
    assert said in str(caught.value)
    assert "zoo.py" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "said"), [("missing.py", "does not exist"), ("zoo.txt", "not a Python file")], ids=["missing", "not .py"]
)
def test_what_is_no_python_file_is_refused(tmp_path, name, said):
    write(tmp_path, "MODELS = {'a': print}", "zoo.txt")
    with pytest.raises(HashbenchError, match=said):
        catalog(str(tmp_path / name))


def test_a_file_that_prints_is_listed_all_the_same(tmp_path, capfd):
    path = write(tmp_path, "import atexit\nprint('{}' * 99999)\natexit.register(print, 'late')\nMODELS = {'a': print}")
    assert [spec.name for spec in FileSuite(path).catalog()] == ["a"]
    assert capfd.readouterr() == ("", "")


def test_a_thread_that_a_file_leaves_behind_is_not_waited_for(tmp_path):
    text = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\nMODELS = {'a': print}"
    assert [spec.name for spec in FileSuite(write(tmp_path, text)).catalog()] == ["a"]


def test_a_file_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    note = tmp_path / "children"
    path = write(
        tmp_path,
        "import os, pathlib, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"note = pathlib.Path({str(note)!r})\n"
        "note.with_suffix('.partial').write_text(f'{os.getpid()} {child.pid}')\n"
        "note.with_suffix('.partial').rename(note)\nchild.wait()",
    )
    seconds = 0.5
    while not note.exists():  # a busy machine needs longer to come as far as that
        assert seconds < 200
        monkeypatch.setattr("hashbench.core.suites.python_suites.LISTING_SECONDS", seconds)
        with pytest.raises(HashbenchError, match=rf"took longer than {seconds:g} seconds"):
            FileSuite(path).catalog()
        seconds *= 3
    wait_until(lambda: not any(map(alive, map(int, note.read_text().split()))))


def test_two_zoo_files_of_one_name_are_two_modules(tmp_path):
    for folder, value in (("first", 1.0), ("second", 2.0)):
        (tmp_path / folder).mkdir()
        text = f"import torch\nMODELS = {{'m': lambda: (torch.nn.Identity(), (torch.tensor({value}),))}}"
        write(tmp_path / folder, text)
    made = [load(spec_of(tmp_path / folder / "zoo.py", "m"), mode="inference") for folder in ("first", "second")]
    assert torch.stack([workload.inputs[0] for workload in made]).tolist() == [1.0, 2.0]


MARKED = """
    import hashbench

    @hashbench.model
    def plain():
        import torch
        return torch.nn.Identity(), (torch.ones(2),)

    @hashbench.model(name="wide/one", task="toy", batch_size=3, skip_training="no parameters", default=False, runs=5)
    def sized(batch_size):
        import torch
        return torch.nn.Identity(), (torch.ones(batch_size, 2),)

    MODELS = {"listed": plain}
"""


def test_marked_functions_are_listed_with_what_they_were_marked_with_and_given_their_batch_size(tmp_path):
    listed, sized = catalog(str(write(tmp_path, MARKED)))
    for asked, rows in ((None, 3), (7, 7)):
        assert load(sized, batch_size=asked, mode="inference").inputs[0].shape == (rows, 2)
    assert (listed.name, listed.batch_size, listed.default) == ("listed", None, True)
    facts = {"task": "toy", "batch_size": 3, "skip_training": "no parameters", "default": False, "runs": 5}
    assert sized == ModelSpec(suite="zoo", source=str(tmp_path / "zoo.py"), name="wide/one", **facts)


def test_marking_does_not_import_torch(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import zoo; print('torch' in sys.modules)"
    write(tmp_path, MARKED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
