"""``hashbench list``, ``diff``, ``compare``, ``env`` and ``docs``."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from command_helpers import ZOO, Main, run

from hashbench.cli.reading import COLUMNS
from tests.cli.cli_helpers import trace_of
from tests.extensions.debugmode import debug_logs

pytestmark = pytest.mark.xdist_group("cli swept")


def test_diff_shows_records_neighbours_and_module(main: Main, folder: Path) -> None:
    traces = [trace_of(folder, "drifting", number) for number in (1, 2)]
    done = main("diff", *traces, cwd=folder)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    facts = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines if line and line[0] not in "+- "}
    assert facts["origin"] == "outside"
    assert facts["kernel"] == "aten.add.Tensor"
    marked = [line for line in lines if line.startswith(("- op\t", "+ op\t"))]
    node = facts["first divergence"]
    assert [line[0] for line in marked if line.split("\t")[1] == node] == ["-", "+"]
    neighbours = [line.split("\t")[1] for line in lines if line.startswith(("  op\t", "- op\t"))]
    assert [node.split("/", 1)[1].split("#")[0] for node in neighbours] == [
        "Drifts.first/aten.t.default",
        "Drifts.first/aten.addmm.default",
        "Drifts/aten.add.Tensor",
        "Drifts.second/aten.t.default",
        "Drifts.second/aten.addmm.default",
        "Drifts.first/aten.t.default",
    ]
    assert facts["results"] == "output.0, output.1"
    assert lines[-1] == "Next: " + " ".join(["hashbench diff", *map(str, traces), "--context 10"])


def test_diff_of_a_sweeps_traces_names_the_repro(main: Main, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out/repro/zoo.drifting").mkdir(parents=True)
    (tmp_path / "out/repro/zoo.drifting/call.json").touch()
    (tmp_path / "out/traces").mkdir()
    traces = [tmp_path / f"out/traces/zoo.drifting.run{number}.log.gz" for number in (1, 2)]
    for number, path in enumerate(traces, 1):
        shutil.copy(trace_of(folder, "drifting", number), path)
    done = main("diff", *traces, cwd=tmp_path)
    assert "\nNext: hashbench replay out/repro/zoo.drifting\n      hashbench diff " in done.stdout, done.stderr


def test_diff_of_equal_traces_exits_with_0(main: Main, folder: Path) -> None:
    done = main("diff", "whole.log", trace_of(folder, "steady", 2), cwd=folder)
    assert done.returncode == 0
    assert done.stdout.startswith("The traces are equal: ")
    assert main("diff", "whole.log", trace_of(folder, "drifting"), cwd=folder).returncode == 1


def test_diff_reads_logs_of_debug_mode(main: Main, folder: Path, tmp_path: Path) -> None:
    for name, left in (("a.json", 1.0), ("b.json", 1.0), ("c.json", 2.0)):
        (tmp_path / name).write_text(debug_logs.document(debug_logs.op("mm", 3.0, left=left)))
    (tmp_path / "old.json").write_text(debug_logs.document(version=0))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress((tmp_path / "a.json").read_bytes()))
    same = main("diff", "a.json.gz", "b.json", cwd=tmp_path)
    assert (same.returncode, same.stdout.splitlines()[0]) == (
        0,
        "The logs agree: 1 call; hashes: 1 of outputs, 1 of inputs",
    )
    other = main("diff", "a.json", "c.json", "--context", "0", cwd=tmp_path)
    assert other.returncode == 1
    assert other.stdout.startswith("The runs diverge: kernel aten::mm\nfirst divergence: /aten::mm#0\n")
    for second, reason in (("old.json", "another torch wrote it"), (folder / "whole.log", "cannot compare a log")):
        refused = main("diff", "a.json", second, cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert reason in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_compare_exits_with_1_only_if_worse(main: Main, folder: Path) -> None:
    better = (folder / "out" / "accuracy.csv").read_text().replace("eager_two_runs_differ", "pass")
    (folder / "better.csv").write_text(better)
    assert main("compare", "out", "out", cwd=folder).returncode == 0
    worse = main("compare", "better.csv", "out", cwd=folder)
    assert worse.returncode == 1
    assert "drifting" in worse.stdout


IN_PLACE = "import sys; sys.path.remove(''); from hashbench.cli import main; sys.exit(main())"
"""As the installed command does: the folder where the user stands is not on the module path."""


@pytest.mark.slow
def test_zoo_file_imports_nothing_from_the_cwd(folder: Path) -> None:
    (folder / "xxhash.py").write_text("raise RuntimeError('the wrong one')\n")
    (folder / "zoos").mkdir()
    (folder / "zoos" / "zoo.py").write_text(f"import xxhash\n{ZOO}")
    done = run("list", "--suite", "zoos/zoo.py", cwd=folder, code=IN_PLACE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_env_prints_the_environment_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('the wrong torch')\n")
    done = run("env", cwd=tmp_path, code=IN_PLACE)
    assert done.returncode == 0, done.stderr
    fingerprint = json.loads(done.stdout)
    keys = "key schema python platform packages torch libraries cpu threads device variables tracer"
    assert list(fingerprint) == [*keys.split(), "tracer_reason", "digests"]
    assert fingerprint["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert (fingerprint["threads"]["intra_op"], fingerprint["variables"]["OMP_NUM_THREADS"]) == (1, "1")
    assert fingerprint["device"] == {"type": "cpu"}


def test_list_shows_the_models_of_a_zoo(main: Main, tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(ZOO)
    shown = main("list", "--suite", "zoo.py", cwd=tmp_path).stdout
    head, _, *rows, _, total = shown.splitlines()
    assert [re.sub(r"\s+", " ", one) for one in re.split(r"\s{2,}", head)] == list(COLUMNS)
    assert [line.split()[:2] for line in rows] == [["zoo", "drifting"], ["zoo", "steady"]]
    assert total == "2 models"


def test_list_says_first_what_a_model_does(main: Main, tmp_path: Path) -> None:
    models = json.loads(main("list", "--suite", "specimens", "--format", "json", cwd=tmp_path).stdout)
    shown = main("list", "--suite", "specimens", cwd=tmp_path).stdout
    known = [one for one in models if one["note"] and (one["devices"] or one["skip_inference"])]
    assert known
    for one in known:
        (line,) = (line for line in shown.splitlines() if line.split()[1:2] == [one["name"]])
        assert re.search(rf"{re.escape(one['note'])}; (needs|no) ", line)


def test_docs_lists_the_groups_of_its_pages_and_prints_one(main: Main, tmp_path: Path) -> None:
    listed = main("docs", cwd=tmp_path).stdout
    assert re.findall(r"^(?!hashbench)\S.*", listed, re.MULTILINE) == ["Start", "Read results", "Questions", "Inside"]
    assert re.search(r"^Read results\n  csv  +\S.*\n    csv_columns  +\S", listed, re.MULTILINE)
    page = main("docs", "csv", cwd=tmp_path).stdout
    assert page.startswith("# ")
    assert main("docs", "docs/csv.md", cwd=tmp_path).stdout == page
    refused = main("docs", "cvs", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no page 'cvs'" in refused.stderr
