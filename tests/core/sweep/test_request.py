"""What a request does beside its sweep: the executor of other machines, kernel fingerprints of changed models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Never

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import forget_models
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.suites.selection import Selection
from hashbench.core.sweep import request as requests
from hashbench.core.sweep.request import SweepRequest


def test_fingerprints_of_outdated_models_are_deleted(tmp_path):
    document = pytest.importorskip("hashbench.extensions.fingerprint.document")
    request = SweepRequest(Selection(suites=("zoo",)), RunOptions(mode="inference"), tmp_path)
    paths = [document.path_in(tmp_path, ("zoo", name, "inference")) for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    missing = ModelSpec(suite="zoo", name="none")
    forget_models([ModelSpec(suite="zoo", name="a"), missing], request)
    assert [path.exists() for path in paths] == [False, True]


@pytest.mark.parametrize(("tracer", "loads_recorder"), [("auto", True), ("native", True), ("python", False)])
def test_machines_load_the_recorder_before_they_fork_workers_that_may_use_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tracer: str, loads_recorder: bool
) -> None:
    asked: dict[str, Any] = {}

    def make(*_: object, **how: Any) -> Never:
        asked.update(how)
        raise HashbenchError("nothing to run on")

    monkeypatch.setattr(requests, "executor_maker", lambda _: make)
    request = SweepRequest(Selection(("specimens",)), RunOptions(tracer=tracer), tmp_path, executor="ray", jobs=3)
    with pytest.raises(HashbenchError, match="nothing to run on"):
        requests.run(request)

    assert (asked["jobs"], asked["cluster"]) == (3, request.cluster)
    assert ("hashbench.core.trace.native:load" in asked["preload"]) is loads_recorder
