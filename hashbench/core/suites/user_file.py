"""A user's Python file, of which a command calls functions by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.core.errors import HashbenchError
from hashbench.core.suites.python_suites import UnusableError, import_file
from hashbench.core.text import squeezed


@dataclass(frozen=True, slots=True)
class UserFile:
    """What a file defines. It is the user's own code: it and its functions are run in this process.

    Attributes:
        path: of the file.
        names: what its module has, by name.
        example: what it needs, for error messages.
    """

    path: Path
    names: Mapping[str, Any]
    example: str

    @classmethod
    def read(cls, path: Path, *, example: str) -> UserFile:
        """Import a file.

        Raises:
            HashbenchError: there is no such file, it is no Python, or its import fails.
        """
        try:
            return cls(path, vars(import_file(path, example=example)), example)
        except UnusableError as error:
            raise unusable(path, error.what, error.tip) from error
        except (Exception, SystemExit) as error:
            raise unusable(path, f"its import raised {_in_words(error)}", f"Try: python {path}") from error

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of this name.

        Raises:
            HashbenchError: there is none, or it is none.
        """
        value = self.names.get(name)
        if callable(value):
            return value  # type: ignore[no-any-return]
        kind = type(value).__name__
        what = f"it has no function {name}" if value is None else f"its {name} is a {kind}, not a function"
        raise self.unusable(what, f"It needs {self.example}.")

    def called(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns; what it raises is a :class:`HashbenchError` that calls it ``name``."""
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            raise self.unusable(f"{name}() raised {_in_words(error)}", f"Try: python -i {self.path}") from error

    def model(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the model that a function builds; raise as :meth:`called`, also where it returns none."""
        made = self.called(name, function, *arguments)
        if callable(made):
            return made
        what = f"{name}() returned a value of type {type(made).__name__}, which is not a model"
        raise self.unusable(what, "Return a torch.nn.Module.")

    def inputs(self, name: str, function: Callable[..., Any]) -> Any:
        """Return the inputs that a function makes; raise as :meth:`called`, also where it returns ``None``."""
        made = self.called(name, function)
        if made is None:
            raise self.unusable(f"{name}() returned None", "Return a tuple, a dict or a tensor.")
        return made

    def unusable(self, problem: str, tip: str) -> HashbenchError:
        """Return the error that this file cannot be used."""
        return unusable(self.path, problem, tip)


def unusable(path: Path, problem: str, tip: str) -> HashbenchError:
    """Return the error that a file cannot be used."""
    return HashbenchError(f"cannot check {path}", consequence=problem, tip=tip)


def takes_an_argument(function: Callable[..., Any]) -> bool:
    """Return whether a function declares a parameter; ``True`` for one that does not tell."""
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return True


def _in_words(error: BaseException) -> str:
    return squeezed(f"{type(error).__name__}: {error}")
