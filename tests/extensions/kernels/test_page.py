"""The page of a kernel: its errors over positions."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hashbench.core.finding.page import as_html
from hashbench.core.run.rounding import LIMIT
from hashbench.extensions.kernels.finding import finding_of
from hashbench.extensions.kernels.page import LEGEND, LEVELS, WITHIN, figures_of, level_of, picture_of
from tests.extensions.kernels.verdicts import GRADIENT, OUTPUT, RIGHT, VERDICTS


def test_the_colours_change_where_rounding_ends() -> None:
    assert WITHIN == LIMIT
    assert len(LEGEND) == len(LEVELS) + 1
    assert LEGEND[level_of(LIMIT)] == "up to 16"
    assert "beyond rounding" in LEGEND[level_of(LIMIT + 0.001)]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (0.0, "equal"),
        (0.2, "up to 1 unit"),
        (4.0, "up to 4"),
        (float("inf"), "more, or NaN"),
        (float("nan"), "more, or NaN"),
    ],
)
def test_each_error_has_its_colour(units: float, words: str) -> None:
    assert LEGEND[level_of(units)] == words


def cells(path: str) -> list[tuple[int, int, int]]:
    """Column, row and length of each rectangle."""
    return [(int(x), int(y), int(n)) for x, y, n in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path)]


def test_cells_of_a_row_with_one_colour_are_one_rectangle_and_all_cells_are_drawn_once() -> None:
    picture = picture_of(replace(OUTPUT, picture=((0.0, 0.5, 0.7, 300.0), (0.5, 0.5, 0.5, 0.5))))
    drawn = {kind: cells(path) for kind, path in picture.paths}
    assert drawn == {"e0": [(0, 0, 1)], "e1": [(1, 0, 2), (0, 1, 4)], "e5": [(3, 0, 1)]}
    assert sum(length for runs in drawn.values() for *_, length in runs) == picture.columns * picture.rows
    assert picture.worst == (3, 0)


def test_nan_is_the_largest_error_and_equal_results_have_none() -> None:
    assert picture_of(GRADIENT).worst == (1, 0)
    assert picture_of(replace(OUTPUT, ratio=0.0, picture=((0.0, 0.0),))).worst is None


def test_a_picture_is_told_in_words() -> None:
    assert "3 of 4 cells beyond rounding; largest error inf units (across: 1024 positions of the last" in (
        picture_of(GRADIENT).text
    )
    assert "no cell beyond rounding; largest error 1.3 units" in picture_of(OUTPUT).text
    assert "down: 128 rows" in picture_of(OUTPUT).text
    assert "down" not in picture_of(replace(OUTPUT, shape=(1024,), picture=((1.0, 2.0),))).text


def test_a_vector_and_a_matrix_are_both_seen() -> None:
    vector = picture_of(replace(OUTPUT, picture=(64 * (1.0,),)))
    matrix = picture_of(replace(OUTPUT, picture=64 * (64 * (1.0,),)))
    assert (vector.width, vector.height) == (640, 24)
    assert (matrix.width, matrix.height) == (640, 640)


def test_the_page_has_a_picture_of_each_result_and_escapes_names() -> None:
    verdict = replace(VERDICTS["several faults"], outputs=(replace(OUTPUT, name="<script>"), GRADIENT))
    page = as_html(finding_of(verdict), title="hashbench numeric", **figures_of({"": verdict}))
    assert page.count("<figure>") == 2
    assert page.count('role="img" aria-label="') == 2
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "style=" not in page
    assert all(words in page for words in LEGEND)


def test_the_pictures_of_dtypes_are_called_by_them() -> None:
    figures = figures_of({"float32": RIGHT, "bfloat16": VERDICTS["several faults"]})["figures"]
    assert "float32: output" in figures
    assert "bfloat16: gradient of input 0" in figures


def test_without_pictures_there_is_no_figure() -> None:
    assert figures_of({"": VERDICTS["not known"]}) == {}
