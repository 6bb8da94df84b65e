"""What a request does beside its sweep: kernel fingerprints of models whose file has changed."""

from __future__ import annotations

from hashbench.fingerprint import document
from hashbench.records import ModelSpec, RunOptions
from hashbench.suites.selection import Selection
from hashbench.sweep import request as requests
from hashbench.sweep.request import SweepRequest


def test_fingerprints_of_outdated_models_are_deleted(tmp_path):
    request = SweepRequest(Selection(suites=("zoo",)), RunOptions(mode="inference"), tmp_path)
    paths = [document.path_in(tmp_path, ("zoo", name, "inference")) for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    missing = ModelSpec(suite="zoo", name="none")
    requests._remove_fingerprints([ModelSpec(suite="zoo", name="a"), missing], request)
    assert [path.exists() for path in paths] == [False, True]
