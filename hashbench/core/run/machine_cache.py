"""Keep what a look at this machine found for a day: the look imports torch, which takes seconds.

A description is found again under a key of all that it can depend on, none of which needs torch: files of torch and of
hashbench, libraries in the native tracer's cache, versions, Python, processor, affinity, host, boot, driver, device
files and environment variables. Nothing in it changes by itself, as load or free memory do.

It lies in the folders of :mod:`hashbench.core.native.cache`, which no other user can write. A file that is damaged, of
another key, or older than a day counts as absent; where no folder can be written, nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hashbench
from hashbench.core.io import replace_file
from hashbench.core.native import cache as caches
from hashbench.core.native.cache import UnusableFolderError
from hashbench.core.owners import torch_folder
from hashbench.core.sealed import Sealed

KEPT_SECONDS = 86400.0
"""Age in seconds from which a description counts as absent."""

_PREFIX = "machine-"
_FILE = Sealed(schema=1, what="description of a machine")
_DEVICES = (
    *("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/*", "/dev/kfd"),
    *("/proc/driver/nvidia/gpus/*", "/proc/driver/nvidia/capabilities/gpu*/mig/*"),
)
_IDENTITIES = (
    "/proc/sys/kernel/random/boot_id",
    "/proc/driver/nvidia/version",
    "/sys/module/amdgpu/version",
    "/proc/cpuinfo",
)
_VOLATILE = ("cpu MHz", "bogomips")
"""Starts of lines of ``/proc/cpuinfo`` that change from one moment to the next."""


@dataclass(frozen=True, slots=True)
class AskedLook:
    """What was asked of a look at this machine.

    Attributes:
        asked: device, tracer and backend.
        variables: environment variables that libraries read.
        packages: versions of installed packages, by name.
    """

    asked: tuple[str, ...]
    variables: Mapping[str, str]
    packages: Mapping[str, str]

    def key(self) -> str:
        """Return a digest of all that the description depends on."""
        parts = [
            *(list(self.asked), dict(self.variables), dict(self.packages)),
            *(sys.version, sys.executable, sys.flags.hash_randomization, platform.uname()[:-1]),
            *(os.cpu_count(), _affinity(), [_identity(Path(path)) for path in _IDENTITIES]),
            sorted(str(path) for pattern in _DEVICES for path in Path("/").glob(pattern[1:])),
            [_stamps(folder, ("*.so", "*.failed")) for folder in caches.folders()],
            _stamps(_torch(), ("version.py", "lib/*")),
            _newest(_stamps(Path(hashbench.__file__).parent / "core", ("**/*.py", "**/*.cpp", "**/*.h"))),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def recall(look: AskedLook) -> dict[str, Any] | None:
    """Return the description that an equal look found within the last day; ``None`` if there is none."""
    key = look.key()
    for folder in _folders():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = _FILE.read_document(_file(folder, key))
            age = time.time() - float(content["made"])
            if content["key"] == key and 0 <= age < KEPT_SECONDS and isinstance(content["environment"], dict):
                return dict(content["environment"])
    return None


def keep(look: AskedLook, environment: Mapping[str, Any]) -> None:
    """Keep a description for :func:`recall`, in the first folder that can be written, and remove old ones. The key is
    that of now: a look may have compiled the native tracer."""
    key = look.key()
    content = {"schema": _FILE.schema, "key": key, "made": time.time(), "environment": environment}
    for place in caches.folders():
        with contextlib.suppress(OSError, UnusableFolderError):
            folder = caches.resolve_or_create(place)
            replace_file(_file(folder, key), _FILE.document(content))
            _remove_old(folder)
            return


def _folders() -> Iterator[Path]:
    for place in caches.folders():
        with contextlib.suppress(UnusableFolderError):
            if folder := caches.resolve(place):
                yield folder


def _file(folder: Path, key: str) -> Path:
    return folder / f"{_PREFIX}{key[:16]}.json"


def _remove_old(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*.json"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= KEPT_SECONDS:
                path.unlink()


def _affinity() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _identity(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith(_VOLATILE))


def _torch() -> Path:
    return Path(torch_folder())


def _stamps(folder: Path, patterns: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return path, bytes and time of change of the files in ``folder``."""
    found = []
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):
            seen = path.stat()
            found.append((str(path), seen.st_size, seen.st_mtime_ns))
    return sorted(found)


def _newest(stamps: list[tuple[str, int, int]]) -> tuple[int, int]:
    """Return how many files there are, and when the last one changed."""
    return len(stamps), max((when for _, _, when in stamps), default=0)
