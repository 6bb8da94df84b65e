"""A night as JUnit XML: one test case per model, in the form that CI servers read.

What got worse is a failure. What is expected is no success either: a model that differs or fails as expected, and one
that was skipped, are skipped test cases that say why. (There is no official schema; this keeps to the common ground of
Ant's, Jenkins' and pytest's.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from xml.etree import ElementTree

from hashbench.catalog import kind_of
from hashbench.report.describe import message
from hashbench.report.expectations import ExpectationStatus, Judged, Judgement
from hashbench.report.history import History

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, not even escaped: control characters, lone surrogates, U+FFFE, U+FFFF."""

_FACTS = (
    *("origin", "kernel", "module", "phase", "cause", "confidence", "because", "evidence", "advice", "repro", "error"),
)


def as_junit(history: History, judged: Judged) -> str:
    """The XML document of the last night. Models that the night was not asked for have no test case."""
    root = ElementTree.Element("testsuites", name=_xml(f"hashbench {judged.night}"))
    asked = [one for one in judged.judgements if one.status is not ExpectationStatus.NOT_ASKED]
    when = history.nights[-1].when
    for group, lot in groupby(sorted(asked, key=lambda one: one.key), key=lambda one: one.key[:-1]):
        root.append(_suite(".".join(filter(None, group)), map(_case, lot), when))
    if judged.problems:
        root.append(_suite("night", map(_problem, judged.problems), when))
    _count(root, list(root))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(name: str, cases: Iterable[ElementTree.Element], when: str) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=_xml(name), timestamp=_xml(when.partition("+")[0]))
    suite.extend(cases)
    cases_inside = list(suite)
    suite.set("tests", str(len(cases_inside)))
    for kind in ("failure", "skipped"):
        suite.set(f"{kind}s".replace("skippeds", "skipped"), str(sum(case.find(kind) is not None for case in suite)))
    suite.set("errors", "0")
    suite.set("time", f"{sum(float(case.get('time', 0)) for case in suite):.3f}")
    return suite


def _count(root: ElementTree.Element, suites: Sequence[ElementTree.Element]) -> None:
    for name in ("tests", "failures", "skipped", "errors"):
        root.set(name, str(sum(int(suite.get(name, 0)) for suite in suites)))
    root.set("time", f"{sum(float(suite.get('time', 0)) for suite in suites):.3f}")


def _case(one: Judgement) -> ElementTree.Element:
    *group, name = one.key
    case = ElementTree.Element("testcase", classname=_xml(".".join(filter(None, group))), name=_xml(name))
    if one.new is not None and one.new.seconds is not None:
        case.set("time", f"{one.new.seconds:.3f}")
    facts = _xml(_facts(one))
    verdict = kind_of(one.new.accuracy if one.new else "")
    if one.worse:
        ElementTree.SubElement(case, "failure", message=_xml(message(one)), type=_xml(one.word)).text = facts
    elif verdict == "skip":
        ElementTree.SubElement(case, "skipped", message=_xml(one.new.error if one.new else ""))
    elif verdict != "pass":
        ElementTree.SubElement(case, "skipped", message=_xml(message(one)))
        ElementTree.SubElement(case, "system-out").text = facts
    elif one.status not in (ExpectationStatus.MET, ExpectationStatus.UNEXPECTED):
        ElementTree.SubElement(case, "system-out").text = _xml(message(one))
    return case


def _problem(problem: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname="night", name=_xml(problem[:200]))
    ElementTree.SubElement(case, "failure", message=_xml(problem), type="problem")
    return case


def _facts(one: Judgement) -> str:
    values = ((column, getattr(one.new, column, "")) for column in _FACTS)
    return "\n".join(f"{column}: {value}" for column, value in values if value)


def _xml(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)
