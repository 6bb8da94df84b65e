"""Histories, nights and traces written by hand, for the tests of what a report shows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hashbench.core.records import Leaf, OpRecord, Ref, Result, Row, TensorDigest, Trace
from hashbench.core.report.compare import EnvironmentChange
from hashbench.extensions.report.expectations import JudgedNight, judge
from hashbench.extensions.report.history import History, ModelRows, Night
from tests.core.report.rows import PLAIN, sweep
from tests.experiment_texts import evidence

TORCH_CHANGED = (EnvironmentChange("packages.torch", "2.15.0", "2.16.0"),)

EVIDENCE = evidence(
    *("call/repeat 33/33", "call/one_thread 0/20", "call/exact_values 0/20"),
    *("call/busy (the outcome differs in place)", "call/onednn_off 20/20"),
)

DIAGNOSED = dataclasses.replace(
    PLAIN,
    name="message_passing",
    suite="specimens",
    accuracy="eager_two_runs_differ",
    origin="kernel",
    kernel="aten.index_put.default",
    op_index=2,
    phase="backward",
    iteration=0,
    module="Net.gather",
    detail="the output differs although every input is equal",
    cause="accumulation_order",
    confidence="proven",
    because="33 of 33 unmodified replays differ; 0 of 20 with one thread",
    evidence=EVIDENCE,
    distinct=34,
    trials=33,
    rate_of="replays",
    rate=1.0,
    rate_low=0.91,
    rate_high=1.0,
    differing_elements=101169,
    max_abs_diff=3.5e-7,
    advice="Use a kernel that adds in one order.",
    deterministic_doc="deterministic under the flag",
    repro="repro/specimens.training.message_passing",
    reproduced="in a fresh process 20 of 20 calls differ",
    traces="traces/one.run1.log traces/one.run2.log",
)


def passing(row: Row) -> Row:
    """The same model on a night when it passed."""
    return dataclasses.replace(PLAIN, name=row.name, suite=row.suite, mode=row.mode, dtype=row.dtype, dev=row.dev)


def diagnosed(name: str, **values: Any) -> Row:
    """A model that differs, with another name."""
    return dataclasses.replace(DIAGNOSED, name=name, **values)


def failed(name: str, accuracy: str = "crashed", error: str = "died with signal 9", **values: Any) -> Row:
    return dataclasses.replace(PLAIN, name=name, accuracy=accuracy, error=error, **values)


def history(
    *nights: Sequence[Row],
    folder: Path = Path("nights"),
    changed: Mapping[int, tuple[EnvironmentChange, ...]] | None = None,
    problems: tuple[str, ...] = (),
) -> History:
    """What :func:`hashbench.extensions.report.history.load_history` would read from these nights in ``folder``."""
    gathered = ModelRows()
    for number, rows in enumerate(nights):
        for row in rows:
            gathered.add([row], file=folder / f"{row.suite}_{row.mode}" / "accuracy.csv", night=number)
    return History(
        nights=tuple(
            Night(
                label=f"2026-11-{number + 1:02}",
                folder=folder,
                counts=Counter(row.accuracy for row in rows),
                changed=(changed or {}).get(number, ()),
                problems=problems if number == len(nights) - 1 else (),
            )
            for number, rows in enumerate(nights)
        ),
        models=tuple(gathered.models(last=len(nights) - 1)),
    )


def judged(*nights: Sequence[Row], **values: Any) -> JudgedNight:
    """The last night against the one before it; ``values`` are those of :func:`history`."""
    new, *earlier = (sweep(*rows) for rows in reversed(nights))
    last, before = (earlier[0], len(nights) - 2) if earlier else (None, None)
    return judge(history(*nights, **values), new, last=last, before=before)


# -------------------------------------------------------------------------------------------------- traces


def digest(value: str) -> TensorDigest:
    return TensorDigest("float32", (4,), (1,), value.ljust(16, "0"))


def record(name: str, *reads: str, module: str = "Net", value: str = "", phase: str = "forward") -> OpRecord:
    op = name.partition("#")[0]
    return OpRecord(
        id=f"{phase}.0/{module}/{name if '#' in name else name + '#0'}",
        phase=phase,
        iteration=0,
        module=module,
        op=op,
        inputs=tuple(Ref(str(place), source) for place, source in enumerate(reads)),
        outputs=(digest(value),) if value else (),
    )


def traces() -> tuple[Trace, Trace]:
    """Two runs that differ in their third op, and in what reads from it."""
    return _trace("aaaa", "bbbb"), _trace("cccc", "dddd")


def _trace(put: str, total: str) -> Trace:
    records = (
        record("aten.mm.default", "input/0", module="Net.encode", value="1111"),
        record("aten.tanh.default", "forward.0/Net.encode/aten.mm.default#0", module="Net.encode", value="2222"),
        record(
            "aten.index_put.default",
            "forward.0/Net.encode/aten.tanh.default#0",
            module="Net.gather",
            value=put,
            phase="backward",
        ),
        record(
            "aten.sum.default",
            "backward.0/Net.gather/aten.index_put.default#0",
            module="Net.update",
            value=total,
            phase="backward",
        ),
    )
    leaves = (Leaf("input/0", "input", digest("0000"), 0),)
    return Trace(records, leaves, (Result("loss", digest(total), records[-1].id),))
