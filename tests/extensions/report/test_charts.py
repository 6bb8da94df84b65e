"""Totals, charts over the nights, and the data of the heat map."""

from __future__ import annotations

import pytest

from hashbench.core.records import Row
from hashbench.extensions.report.charts import (
    Course,
    changes_text,
    course_of,
    first_night_shown,
    payload_of,
    sparkline,
    totals_of,
)
from hashbench.extensions.report.history import History, Interval, ModelHistory, Night
from tests.core.report.rows import row
from tests.extensions.report.histories import DIAGNOSED, TORCH_CHANGED, diagnosed, failed, history, passing


def test_long_list_of_changes_is_cut() -> None:
    assert changes_text(TORCH_CHANGED * 5).endswith("and 2 more")


def test_totals_and_changes_since_last_night() -> None:
    totals = totals_of(history([row("a"), row("b")], [row("a"), diagnosed("b", suite="torchvision")]))
    assert totals == {
        "kinds": {"differ": 1, "fail": 0, "skip": 0, "pass": 1},
        "change": {"differ": 1, "fail": 0, "skip": 0, "pass": -1},
        "statuses": [("eager_two_runs_differ", 1, 0), ("pass", 1, 2)],
        "suites": [("torchvision", "training", {"differ": 1, "fail": 0, "skip": 0, "pass": 1})],
        "kernels": [("aten.index_put.default", "accumulation_order", 1)],
    }


@pytest.mark.parametrize(
    ("nights", "changes"),
    [
        pytest.param([[row("a")]], [None] * 4, id="a first night has nothing to be compared with"),
        pytest.param([[row("a")], [], [failed("a")]], [0, 1, 0, -1], id="a night without rows is passed over"),
    ],
)
def test_what_totals_are_compared_with(nights: list[list[Row]], changes: list[int | None]) -> None:
    assert list(totals_of(history(*nights))["change"].values()) == changes


def test_the_course_is_drawn_in_steps() -> None:
    found = history([DIAGNOSED], [DIAGNOSED], [passing(DIAGNOSED), failed("b")], changed={2: TORCH_CHANGED})
    assert course_of(found.nights) == Course("M0 100V0H2V100H3V100Z", "M0 100V0H3V100Z", top=1, marks=(2,))


def test_intervals_are_kept_as_gaps_and_lengths() -> None:
    found = history([DIAGNOSED], [DIAGNOSED], [], [passing(DIAGNOSED)])
    content = payload_of(found)
    assert content["models"] == [[0, "message_passing", 0, [0, 2, 0, 1, 1, 1]]]
    assert content["states"] == [
        ["eager_two_runs_differ", "D", "differ", "aten.index_put.default", "accumulation_order"],
        ["pass", "P", "pass", "", ""],
    ]
    assert content["scopes"] == [["specimens", "training", "float32", "cpu"]]


def flickering(nights: int, models: int) -> History:
    intervals = tuple(Interval(n, n, "pass" if n % 2 else "timeout") for n in range(nights))
    return History(
        tuple(Night(f"night {n}", counts={"pass": models}) for n in range(nights)),
        tuple(ModelHistory(("s", "training", "float32", "cpu", f"m{m}"), intervals) for m in range(models)),
    )


def test_too_many_intervals_drop_oldest_nights() -> None:
    found = flickering(nights=10, models=4)
    assert first_night_shown(found, limit=40) == 0
    assert first_night_shown(found, limit=12) == 7
    assert first_night_shown(found, limit=1) == 9


@pytest.mark.parametrize(
    ("values", "nights", "path"),
    [
        pytest.param([], 5, None, id="nothing"),
        pytest.param([(0, 2.0)], 1, "M0 0H400", id="one night"),
        pytest.param([(0, 1.0), (1, 1.0), (2, 2.0), (3, 1.0)], 4, "M0 50H200V0H300V50H400", id="steps"),
        pytest.param([(0, 2.0), (3, 2.0)], 4, "M0 0H100M300 0H400", id="a gap"),
        pytest.param([(0, 0.0), (1, 0.0)], 2, "M0 100H400", id="zeros"),
        pytest.param(
            [(n, float(n == 5)) for n in range(200)], 200, "M0 100H8V0H12V100H400", id="more nights than steps"
        ),
    ],
)
def test_a_sparkline_is(values: list[tuple[int, float]], nights: int, path: str | None) -> None:
    line = sparkline(tuple(values), nights=nights)
    assert (line.path if line else None) == path
