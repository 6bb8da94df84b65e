"""The cache of compiled libraries: folders that only their owner can write, files whose names hold their digest.

A library is code that this process will run. It is taken from a folder only where nobody but this user and root can
have put it there, and only where its content has the digest that its name says: ``dlopen`` of half a file ends the
process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hashbench.errors import first_line
from hashbench.io import file_digest, from_json, read_json, replace_file, to_json
from hashbench.text import one_line

VARIABLE = "HASHBENCH_CACHE"
"""The environment variable that names the folder for all of hashbench's caches."""

SCRATCH = ".build-"
"""What the names of folders begin with in which something is compiled just now."""

KEPT_DAYS = 90
"""How long a library stays that nobody uses: that of another torch, or of an older hashbench."""

FAILURE_HOURS = 24
"""How long a failure is remembered: a compiler that was short of memory once should not cost the tracer for ever."""

LEAST_FREE = 32 * 2**20
"""Bytes that must be free: the library and what the compiler writes on the way to it have some MiB."""

_DAY = 86400.0
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FULL = (errno.ENOSPC, errno.EDQUOT)


class UnusableFolderError(Exception):
    """A folder in which no library is kept or looked for; the message says which and why, without a full stop."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What was wrong when ``compilers`` (paths, sizes and times of the programs) were to build a library."""

    compilers: str
    what: str


def folders(cache: Path | None = None) -> tuple[Path, ...]:
    """Where libraries are looked for and kept, the preferred first: ``cache`` alone where it is given, else the user's
    cache folder (``$HASHBENCH_CACHE/native``, ``$XDG_CACHE_HOME/hashbench/native``, ``~/.cache/hashbench/native``) and
    a private folder among the temporary files, for homes that cannot be written."""
    if cache is not None:
        return (cache.absolute(),)
    places = []
    if named := os.environ.get(VARIABLE):
        places.append(Path(os.path.expanduser(named)).absolute())  # noqa: PTH111 – never raises
    else:
        standard = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))  # noqa: PTH111
        # Relative ones are passed over, as the standard has it.
        places += [Path(base, "hashbench") for base in standard if Path(base).is_absolute()][:1]
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files can be written
        places.append(Path(tempfile.gettempdir(), f"hashbench-{os.geteuid()}"))
    return tuple(place / "native" for place in places)


def opened(folder: Path) -> Path | None:
    """The folder without links, in which libraries may be looked for; ``None`` where there is none.

    Raises:
        UnusableFolderError: somebody else could have written what lies there, or nothing in it may be run or read.
    """
    try:
        real = folder.resolve()
        if not real.exists():
            return None
        _refuse_writable_by_others(real)
        _refuse_noexec(real)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        raise _unusable(folder, error) from error
    return real


def made(folder: Path) -> Path:
    """The folder without links, in which a library can be compiled and loaded from; made where there is none.

    Raises:
        UnusableFolderError: as :func:`opened`, or it cannot be made or written, or is full.
    """
    try:
        real = folder.resolve()
        for missing in reversed([path for path in (real, *real.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        _refuse_writable_by_others(real)
        _refuse_noexec(real)
        with tempfile.TemporaryFile(dir=real):
            pass
        found = os.statvfs(real)
    except (OSError, RuntimeError) as error:
        raise _unusable(folder, error) from error
    if found.f_bavail * found.f_frsize < LEAST_FREE:
        raise UnusableFolderError(f"{folder} has less than {LEAST_FREE // 2**20} MiB of free space")
    return real


def _unusable(folder: Path, error: Exception) -> UnusableFolderError:
    why = getattr(error, "strerror", None) or first_line(error)
    return UnusableFolderError(f"{folder} cannot be used ({why})")


def _refuse_noexec(folder: Path) -> None:
    """Raise where ``dlopen`` would be refused."""
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # Linux
        raise UnusableFolderError(f"{folder} is on a file system mounted noexec")


def _refuse_writable_by_others(folder: Path) -> None:
    """Raise where another user could have put a file into ``folder``, or another folder in its place."""
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}  # the last is root also where user namespaces hide that
    for path in (folder, *folder.parents):
        found = path.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise UnusableFolderError(f"{path} is not a folder")
        if found.st_uid not in trusted:
            raise UnusableFolderError(f"{path} belongs to another user, who could put any code there")
        sticky = path != folder and found.st_mode & stat.S_ISVTX  # then only owners rename and remove
        if found.st_mode & _OTHERS_MAY_WRITE and not sticky:
            raise UnusableFolderError(f"{path} can be written by other users, who could put any code there")


# ----------------------------------------------------------------------------------------------------- libraries


def find(folder: Path, prefix: str) -> Path | None:
    """The whole library of the name ``prefix-<digest>.so`` in a folder that :func:`opened` returned; else ``None``."""
    for path in sorted(folder.glob(f"{prefix}-*.so")):
        if _is_whole(path):
            _note_use(path)
            return path
    return None


def store(product: Path, folder: Path, prefix: str) -> Path:
    """Move a library that was compiled in ``folder`` to the name by which :func:`find` finds it, in one step. Damaged
    files of this name are removed, and what nobody has used for long. Raises ``OSError``."""
    product.chmod(0o644)
    path = folder / f"{prefix}-{file_digest(product)}.so"
    product.replace(path)
    for other in folder.glob(f"{prefix}-*.so"):
        if not _is_whole(other):
            other.unlink(missing_ok=True)
    _failure(folder, prefix).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        _remove_old(folder)
    return path


def _is_whole(path: Path) -> bool:
    """Whether a file has the content that its name says, and nobody else can change it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    private = found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_MAY_WRITE
    return private and path.stem.rpartition("-")[2] == file_digest(path)


def _note_use(path: Path) -> None:
    """Set a library's time once a day, by which :func:`_remove_old` knows that it is used."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < time.time() - _DAY:
            os.utime(path)


def _remove_old(folder: Path) -> None:
    """Remove libraries and failures that nobody has used for long, and what compilers left that were killed."""
    now = time.time()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            age = (now - path.lstat().st_mtime) / _DAY
            if path.name.startswith(SCRATCH) and age > 1:
                shutil.rmtree(path)
            elif path.suffix in (".so", ".failed") and age > KEPT_DAYS:
                path.unlink()


# ------------------------------------------------------------------------------------------------------ failures


def _failure(folder: Path, prefix: str) -> Path:
    return folder / f"{prefix}.failed"


def failure(folder: Path, prefix: str, compilers: str) -> str:
    """What was wrong when these compilers tried within the last :data:`FAILURE_HOURS`; empty: they did not."""
    path = _failure(folder, prefix)
    try:
        if time.time() - path.stat().st_mtime > FAILURE_HOURS * 3600:
            return ""
        found = from_json(Failure, read_json(path))
    except (OSError, ValueError):
        return ""
    return one_line(found.what) if found.compilers == compilers else ""


def remember_failure(folder: Path, prefix: str, failed: Failure) -> None:
    """Have :func:`failure` say so, where the folder can be written."""
    with contextlib.suppress(OSError):
        replace_file(_failure(folder, prefix), json.dumps(to_json(failed)))


# ------------------------------------------------------------------------------------------------- one at a time


@contextlib.contextmanager
def alone(folder: Path, *, seconds: float) -> Iterator[None]:
    """A context that one process at a time is in; after ``seconds``, or where the file system has no locks, several may
    be: each then compiles for itself, and the last to finish replaces a whole library by a whole library."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, descriptor)
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield


def says_full(text: str) -> bool:
    """Whether a compiler's errors say that there is no space left."""
    return any(os.strerror(number) in text for number in _FULL)
