"""Render a finding as one HTML file.

The file loads nothing: style and script are inlined, and its content security policy admits these two by their digests
alone. Names, errors and other texts of models are escaped by the template engine, and control characters in them become
spaces.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hashbench.core.finding import Finding
from hashbench.core.text import count, one_line, printable

LONGEST_TEXT = 3000
"""Maximum characters shown of one text of a model."""

HOME = "hashbench.core.finding"
"""The package that has the style and the head of all pages."""

_CODE = frozenset({"kernel", "module", "source line", "forward op", "first run", "second run", "first divergence"})
"""Facts that are names of code."""


def environment(*packages: str) -> Environment:
    """Return a template engine with the shared templates, and those of ``packages``; compiling takes longer than
    filling, so keep it."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (HOME, *packages)]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_presentable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"count_of": count}
    return made


def _presentable(value: Any) -> Any:
    """Return a text on one line, without control characters, cut to :data:`LONGEST_TEXT`; other values unchanged."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = one_line(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def bundled(name: str, package: str = HOME) -> str:
    """Return a file of the templates of a package: style or script."""
    return resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")


def policy_for(style: str, script: str) -> str:
    """Return a content security policy under which only this style and this script run: no other script, no event
    handler in an attribute, no image, no connection."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    style_digest, script_digest = digests
    return (
        f"default-src 'none'; style-src 'sha256-{style_digest}'; script-src 'sha256-{script_digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


_kept = functools.cache(environment)


def as_html(finding: Finding, *, title: str, of: str = "", figures: Markup | None = None, style: str = "") -> str:
    """Return a page that encodes as UTF-8 whatever the names hold.

    Args:
        finding: what to show.
        title: the command, such as ``hashbench diff``.
        of: what was compared, such as two paths.
        figures: plots of the comparison, shown below the facts.
        style: further style of the figures.
    """
    sheet = bundled("style.css") + bundled("finding.css") + style
    return printable(
        _kept()
        .get_template("finding.html")
        .render(
            finding=finding,
            headline=one_line(finding.headline),
            title=title,
            of=of,
            figures=figures or Markup(""),
            policy=policy_for(sheet, ""),
            style=Markup(sheet),
            code=_CODE,
        )
    )
