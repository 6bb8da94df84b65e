"""Cache of compiled libraries: folders writable by their owner only, file names that contain the file's digest.

A library is code that this process will run. It is loaded only from folders that no user but this one and root can
write, and only if its content has the digest in its name: ``dlopen`` of half a file ends the process with SIGBUS.
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

from hashbench.core.errors import first_line
from hashbench.core.io import file_digest, from_json, read_json, replace_file, to_json
from hashbench.core.text import one_line

VARIABLE = "HASHBENCH_CACHE"
"""Environment variable with the folder of all of hashbench's caches."""

SCRATCH = ".build-"
"""Prefix of temporary build folders."""

KEPT_DAYS = 90
"""Days after which an unused library is removed: that of another torch, or of an older hashbench."""

FAILURE_HOURS = 24
"""Hours for which a failure is remembered: a compiler once short of memory must not disable the tracer for ever."""

LEAST_FREE = 32 * 2**20
"""Bytes that must be free: the library and the compiler's temporary files take some MiB."""

_DAY = 86400.0
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FULL = (errno.ENOSPC, errno.EDQUOT)


class UnusableFolderError(Exception):
    """Folder that cannot hold libraries; the message says which and why, without a full stop."""


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Failure of ``compilers`` (paths, sizes and mtimes of the programs) to build a library."""

    compilers: str
    what: str


def folders(cache: Path | None = None) -> tuple[Path, ...]:
    """Return the folders of libraries in order of preference: ``cache`` alone if given, else the user's cache folder
    (``$HASHBENCH_CACHE/native``, ``$XDG_CACHE_HOME/hashbench/native``, ``~/.cache/hashbench/native``) and a private
    temporary folder, for homes that cannot be written."""
    if cache is not None:
        return (cache.absolute(),)
    places = []
    if named := os.environ.get(VARIABLE):
        places.append(Path(os.path.expanduser(named)).absolute())  # noqa: PTH111 – never raises
    else:
        standard = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))  # noqa: PTH111
        # Relative paths are ignored, as the XDG specification requires.
        places += [Path(base, "hashbench") for base in standard if Path(base).is_absolute()][:1]
    with contextlib.suppress(FileNotFoundError):  # no writable temporary folder
        places.append(Path(tempfile.gettempdir(), f"hashbench-{os.geteuid()}"))
    return tuple(place / "native" for place in places)


def resolve(folder: Path) -> Path | None:
    """Resolve an existing folder of libraries; return ``None`` if it does not exist.

    Raises:
        UnusableFolderError: another user could have written its files, or they cannot be executed or read.
    """
    try:
        real = folder.resolve()
        if not real.exists():
            return None
        _refuse_writable_by_others(real)
        _refuse_noexec(real)
    except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop
        raise _unusable(folder, error) from error
    return real


def resolve_or_create(folder: Path) -> Path:
    """Resolve a folder in which a library can be compiled and loaded; create it if necessary.

    Raises:
        UnusableFolderError: as :func:`resolve`, or it cannot be created or written, or is full.
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
    """Raise if ``dlopen`` would fail here."""
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # Linux
        raise UnusableFolderError(f"{folder} is on a file system mounted noexec")


def _refuse_writable_by_others(folder: Path) -> None:
    """Raise if another user could have put a file into ``folder``, or replaced it by another folder."""
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}  # the last is root even inside user namespaces
    for path in (folder, *folder.parents):
        found = path.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise UnusableFolderError(f"{path} is not a folder")
        if found.st_uid not in trusted:
            raise UnusableFolderError(f"{path} belongs to another user, who could put any code there")
        sticky = path != folder and found.st_mode & stat.S_ISVTX  # only owners may rename and remove
        if found.st_mode & _OTHERS_MAY_WRITE and not sticky:
            raise UnusableFolderError(f"{path} can be written by other users, who could put any code there")


# ----------------------------------------------------------------------------------------------------- libraries


def find(folder: Path, prefix: str) -> Path | None:
    """Return the intact library ``prefix-<digest>.so`` in a folder returned by :func:`resolve`; else ``None``."""
    for path in sorted(folder.glob(f"{prefix}-*.so")):
        if _is_whole(path):
            _note_use(path)
            return path
    return None


def store(product: Path, folder: Path, prefix: str) -> Path:
    """Move a library compiled in ``folder`` to the name under which :func:`find` finds it, atomically.

    Damaged files of this name and long unused libraries are removed. Raises ``OSError``.
    """
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
    """Return True if a file has the digest in its name, and only its owner can write it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    private = found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_MAY_WRITE
    return private and path.stem.rpartition("-")[2] == file_digest(path)


def _note_use(path: Path) -> None:
    """Update a library's mtime once a day, by which :func:`_remove_old` knows that it is in use."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < time.time() - _DAY:
            os.utime(path)


def _remove_old(folder: Path) -> None:
    """Remove long unused libraries and failures, and temporary folders of killed compilers."""
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
    """Return the error of these compilers within the last :data:`FAILURE_HOURS`; ``""`` if there was none."""
    path = _failure(folder, prefix)
    try:
        if time.time() - path.stat().st_mtime > FAILURE_HOURS * 3600:
            return ""
        found = from_json(BuildFailure, read_json(path))
    except (OSError, ValueError):
        return ""
    return one_line(found.what) if found.compilers == compilers else ""


def remember_failure(folder: Path, prefix: str, failed: BuildFailure) -> None:
    """Save a failure for :func:`failure`, if the folder is writable."""
    with contextlib.suppress(OSError):
        replace_file(_failure(folder, prefix), json.dumps(to_json(failed)))


# ------------------------------------------------------------------------------------------------- one at a time


@contextlib.contextmanager
def locked(folder: Path, *, seconds: float) -> Iterator[None]:
    """Hold a lock between processes. After ``seconds``, or on file systems without locks, several may enter: each then
    compiles for itself, and the last to finish atomically replaces the library."""
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
    """Return True if a compiler's errors report a full disk."""
    return any(os.strerror(number) in text for number in _FULL)
