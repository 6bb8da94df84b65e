"""Suites that installed packages bring, with a package that is installed for the test."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.suites.registry import catalog, choose, load, names

MODULE = """
    import torch
    MODELS = {"one": lambda: (torch.nn.Identity(), (torch.ones(2),))}
    HOLDER = {"two": lambda: (torch.nn.Identity(), (torch.zeros(2),))}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with these entry points, for this process and its children."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def install(entries: dict[str, str], package: str = "tiny_zoo") -> Path:
        (tmp_path / f"{package}.py").write_text(textwrap.dedent(MODULE))
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
        (metadata / "entry_points.txt").write_text(f"[hashbench.suites]\n{lines}\n")
        return tmp_path

    return install


@pytest.mark.slow
def test_a_package_brings_suites_that_are_listed_and_built(install):
    install({"tiny": "tiny_zoo", "held": "tiny_zoo:HOLDER"})
    assert names()[-2:] == ("held", "tiny")
    (one,) = catalog("tiny")
    (two,) = catalog("held")
    assert [(spec.suite, spec.name, spec.source) for spec in (one, two)] == [("tiny", "one", ""), ("held", "two", "")]
    assert torch.equal(load(one, mode="inference").inputs[0], torch.ones(2))
    assert torch.equal(load(two, mode="training").inputs[0], torch.zeros(2))
    with pytest.raises(HashbenchError, match="--batch-size 4 does not apply to one"):
        load(one, batch_size=4, mode="inference")


def test_all_does_not_run_what_packages_bring(install):
    install({"tiny": "tiny_zoo"})
    assert "tiny" not in choose(["all"]).suites


def test_a_package_that_fails_on_import_is_one_line_that_names_it(install):
    (install({"tiny": "tiny_zoo"}) / "tiny_zoo.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(HashbenchError) as caught:
        catalog("tiny")
    assert str(caught.value) == (
        "cannot use tiny of the package tiny_zoo as a suite: its import raised RuntimeError: no licence. "
        "Try: python -c 'import tiny_zoo'"
    )


def test_a_package_may_not_take_the_name_of_a_bundled_suite(install):
    install({"torchvision": "tiny_zoo"})
    with pytest.raises(
        HashbenchError, match=r"provides a suite 'torchvision': hashbench has one of that name\. Rename"
    ):
        catalog("torchvision")


def test_two_packages_may_not_bring_one_suite(install):
    install({"tiny": "tiny_zoo"})
    install({"tiny": "other_zoo"}, package="other_zoo")
    with pytest.raises(HashbenchError, match="2 installed packages bring a suite 'tiny': other_zoo, tiny_zoo"):
        catalog("tiny")


def test_a_zoo_file_may_not_take_the_name_of_a_packages_suite(install):
    folder = install({"tiny": "tiny_zoo"})
    (folder / "tiny.py").write_text("MODELS = {'a': print}")
    with pytest.raises(HashbenchError, match=r"has the name of the suite 'tiny'.*Rename the file"):
        catalog(str(folder / "tiny.py"))


@pytest.mark.slow
def test_a_file_that_happens_to_have_its_name_does_not_hide_a_packages_suite(install, monkeypatch):
    folder = install({"tiny": "tiny_zoo"})
    (folder / "tiny").write_text("")
    monkeypatch.chdir(folder)
    assert [spec.name for spec in catalog("tiny")] == ["one"]
