"""Functions that build models: marked, listed in ``MODELS``, or both."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

import hashbench
from hashbench.core.suites.python_suites import Facts, UnusableError, facts_of, functions_in


def build():
    raise AssertionError("listing builds nothing")


def marked(name: str):
    @hashbench.model(name=name)
    def function():
        raise AssertionError("listing builds nothing")

    return function


def test_a_mark_changes_nothing_but_says_what_is_known():
    function = marked("net")
    assert facts_of(function) == Facts(name="net")
    with pytest.raises(AssertionError):
        function()


def test_without_parentheses_the_function_gives_the_name():
    @hashbench.model
    def my_net(): ...

    assert facts_of(my_net)["name"] == "my_net"


def test_what_is_listed_and_what_is_marked_come_together_each_once():
    both, alone = marked("other"), marked("alone")
    holder = SimpleNamespace(MODELS={"a": build, "b": both}, both=both, alone=alone, build=build)
    assert functions_in(holder) == {"a": build, "b": both, "alone": alone}


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(UnusableError, match="it has two models named 'a'"):
        functions_in(SimpleNamespace(MODELS={"a": build}, other=marked("a")))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"batch_size": 0}, ValueError, "batch_size=0 is not an integer from 1"),
        ({"batch_size": True}, ValueError, "batch_size=True is not an integer from 1"),
        ({"iterations": 1.5}, ValueError, "iterations=1.5 is not an integer from 1"),
        ({"runs": 1}, ValueError, "runs=1 is not an integer from 2"),
        ({"deterministic": "maybe"}, ValueError, "deterministic='maybe' is not one of on, warn, off"),
        ({"skip_training": True}, TypeError, "skip_training=True is not a string"),
        ({"colour": "red"}, TypeError, "@hashbench.model got an unexpected keyword argument 'colour'; it takes name"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_mark_that_means_nothing_is_refused(arguments, error, said):
    with pytest.raises(error, match=said.replace("(", r"\(")):
        hashbench.model(**arguments)


@pytest.mark.parametrize("misuse", ["net", 3, [build]])
def test_what_is_no_function_is_refused_with_the_right_way_to_write_it(misuse):
    with pytest.raises(TypeError, match=r"@hashbench.model marks a function.*: write @hashbench.model"):
        hashbench.model(misuse)


def test_what_is_called_without_having_a_name_is_marked_with_one():
    assert facts_of(hashbench.model(name="net")(functools.partial(build)))["name"] == "net"
