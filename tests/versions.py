"""Runs the quick tests with the oldest and the newest libraries: ``python tests/versions.py [--as WORDS] [arguments of
pytest]``, for before a release.

Each set is installed into an environment in a temporary folder (6 GB, some minutes), without the extras, and removed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
VERSIONS: Mapping[str, str] = {"the oldest": "3.11", "the newest": "3.13"}
"""Python of each set of libraries."""
TESTS = ("-m", "not slow and not exhaustive", "-n", "2", "--dist", "loadgroup", "-q", "-rs")


def oldest(requirement: str) -> str:
    """A requirement as that of its lower bound alone: ``torch>=2.11`` as ``torch==2.11``."""
    return requirement.replace(">=", "==")


def requirements(which: str) -> list[str]:
    """What is installed for ``the oldest`` or ``the newest``: the dependencies, and what tests need."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    return [oldest(one) for one in wanted] if which == "the oldest" else wanted


def python_of(version: str) -> str:
    """The path of an interpreter: on the PATH, or one of pyenv's, whose shims run the chosen version alone."""
    made = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), key=_numbers)
    found = str(made[-1]) if made else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"there is no Python {version} here: install it, or leave its libraries out with --as")
    return found


def _numbers(path: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", path.parts[-3])]


def passes(which: str, arguments: Sequence[str]) -> bool:
    """Whether the tests pass with these libraries."""
    print(f"=== {which} libraries, Python {VERSIONS[which]}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hashbench-versions-", ignore_cleanup_errors=True) as folder:
        python = Path(folder) / "environment" / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        for command in (
            [python_of(VERSIONS[which]), "-m", "venv", str(python.parents[1])],
            [*pip, *requirements(which)],
            [*pip, "--no-deps", "--editable", str(CHECKOUT)],
        ):
            if subprocess.run(command, check=False).returncode:
                print(f"cannot be installed: {' '.join(command)}", file=sys.stderr)
                return False
        (own := Path(folder) / "tmp").mkdir()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["TMPDIR"] = str(own)
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *(arguments or TESTS)]
        return subprocess.run(command, check=False, cwd=CHECKOUT, env=environment).returncode == 0


def main() -> int:
    """The exit code: 1 where tests fail with one of the sets."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--as", dest="sets", action="append", choices=VERSIONS, help="these libraries alone")
    options, arguments = parser.parse_known_args()
    failed = [one for one in options.sets or VERSIONS if not passes(one, arguments)]
    print(f"\ntests fail with: {', '.join(failed)}" if failed else "\nno test fails with the oldest and the newest")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
