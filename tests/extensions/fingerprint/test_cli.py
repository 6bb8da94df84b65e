"""``hashbench fingerprint``: what it refuses, what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_helpers import ZOO, Main

from hashbench.extensions.fingerprint.document import Fingerprints, Kernel
from hashbench.extensions.fingerprint.verify import ChangedKernel, Verification

RECORD = "fingerprint record --inference --suite zoo.py --output out.hbf"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fingerprint record --inference", "the following arguments are required: -o/--output"),
        ("fingerprint record --output x", "one of the arguments --training --inference is required"),
        (f"{RECORD} --only stedy", "Did you mean steady"),
        (f"{RECORD} --device nonsense", "'nonsense' is not a device"),
        ("fingerprint verify none.hbf", "none.hbf"),
        ("fingerprint verify zoo.py", "zoo.py"),
        ("fingerprint verfy x", "unknown command 'verfy'. Did you mean verify?"),
    ],
)
def test_bad_input_gets_one_line(command: str, said: str, main: Main, tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(ZOO)
    done = main(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"zoo.py"}


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let ``verify`` find this."""

    def found(*changed: ChangedKernel, same: int = 0, **not_run: tuple[Kernel, ...]) -> None:
        verification = Verification((), same + len(changed), same, changed, not_run, {})
        monkeypatch.setattr("hashbench.extensions.fingerprint.document.read", lambda _: Fingerprints({}, ()))
        monkeypatch.setattr("hashbench.extensions.fingerprint.verify.verify", lambda *_, **__: verification)
        monkeypatch.setattr("hashbench.core.run.environment.collect_in_child", lambda **_: {"threads": {"intra_op": 2}})

    return found


def test_no_change_exits_with_0(verified: Any, main: Main, tmp_path: Path) -> None:
    verified(same=3)
    done = main("fingerprint", "verify", "x.hbf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 of 3 kernels changed")


def test_json_has_no_models(verified: Any, main: Main, tmp_path: Path) -> None:
    verified(same=3)
    found = json.loads(main("fingerprint", "verify", "x.hbf", "--json", cwd=tmp_path).stdout)
    assert (found["same"], found["changed"], found["equal"]) == (3, [], True)
    assert "models" not in found


def test_nothing_to_compare_is_no_success(verified: Any, main: Main, tmp_path: Path) -> None:
    verified()
    done = main("fingerprint", "verify", "x.hbf", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot verify x.hbf: no kernel could be compared (it has no kernels)" in done.stderr
