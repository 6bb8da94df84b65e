"""The cache of libraries: locks, damaged files, folders that others can write, full disks."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hashbench.core.native import build as building
from hashbench.core.native import cache
from hashbench.core.native.build import Built, build
from tests.core.native.build_helpers import COPIES, FakeCompiler, built, reason


def test_without_file_locks_it_compiles_twice(
    source: Path, folder: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    assert built(build(cache=folder, source=source)).exists()
    assert len(compiler.started) == 1


@pytest.mark.usefixtures("compiler")
def test_lock_wait_times_out(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(building, "BUILD_SECONDS", 0.2)
    monkeypatch.setattr(building, "_run", lambda _, scratch: (scratch / "library.so").write_bytes(b"library"))
    with cache.locked(folder, seconds=60):
        assert built(build(cache=folder, source=source)).read_bytes() == b"library"


@pytest.mark.parametrize("damage", [b"", b"ha", b"another library"], ids=["empty", "half", "replaced"])
def test_damaged_library_is_rebuilt(damage: bytes, source: Path, folder: Path, compiler: FakeCompiler) -> None:
    path = built(build(cache=folder, source=source))
    path.rename(path.with_name(f"{path.stem[:-1]}x.so")).write_bytes(damage)
    path.write_bytes(damage)
    assert built(build(cache=folder, source=source)).read_bytes() == source.read_bytes()
    assert len(compiler.started) == 2
    assert {file.name for file in folder.iterdir()} == {path.name, ".lock"}


def test_symlink_as_library_is_not_followed(source: Path, folder: Path, compiler: FakeCompiler) -> None:
    path = built(build(cache=folder, source=source))
    path.rename(source.parent / "elsewhere.so")
    path.symlink_to(source.parent / "elsewhere.so")
    assert not built(build(cache=folder, source=source)).is_symlink()
    assert len(compiler.started) == 2


def test_other_source_keeps_used_and_removes_old_libraries(source: Path, folder: Path, compiler: FakeCompiler) -> None:
    def age(path: Path, days: float) -> None:
        when = time.time() - days * 86400
        os.utime(path, (when, when))

    old, used, leftover = folder / "answer-0-0.so", folder / "answer-1-1.so", folder / ".build-killed"
    folder.mkdir(mode=0o700)
    leftover.mkdir()
    for path, days in ((old, 91), (used, 89), (leftover, 2)):
        path.touch()
        age(path, days)
    stranger = folder / "notes.txt"
    stranger.touch()
    age(stranger, 1000)
    path = built(build(cache=folder, source=source))
    assert {path.name, used.name, stranger.name, ".lock"} == {path.name for path in folder.iterdir()}
    age(path, 89)
    build(cache=folder, source=source)
    assert path.stat().st_mtime > time.time() - 86400  # it is in use
    assert len(compiler.started) == 1


@pytest.mark.usefixtures("compiler")
def test_libraries_are_kept_in_the_users_cache(places: tuple[Path, Path], source: Path) -> None:
    found = build(source=source)
    assert isinstance(found, Built)
    assert (found.path.parent, found.note) == (places[0], "")
    made = [places[0], places[0].parent, places[0].parent.parent]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/hashbench/native"),
        ({"XDG_CACHE_HOME": "caches"}, "/home/me/.cache/hashbench/native"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/hashbench/native"),
        ({"HASHBENCH_CACHE": "/mine", "XDG_CACHE_HOME": "/caches"}, "/mine/native"),
        ({"HASHBENCH_CACHE": "~/mine"}, "/home/me/mine/native"),
        ({"HASHBENCH_CACHE": ""}, "/home/me/.cache/hashbench/native"),
        ({"HOME": "me"}, None),
    ],
    ids=str,
)
def test_environment_variables_move_the_cache(
    variables: dict[str, str], expected: str | None, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    wanted = [Path(expected)] if expected else []
    assert cache.folders() == (*wanted, places[1])


def test_unwritable_folders_are_explained(
    places: tuple[Path, Path], source: Path, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    make_read_only(places[0], monkeypatch)
    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert reason(build(source=source)) == (
        f"{places[0]} cannot be used (Read-only file system); name a folder that only you can write in $HASHBENCH_CACHE"
    )
    assert compiler.started == []


def make_unreadable(folder: Path, _: pytest.MonkeyPatch) -> str:
    folder.parent.parent.write_text("a file in place of ~/.cache")
    return "cannot be used (Not a directory)"


def make_read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(path: Path, mode: int = 0o777, **more: bool) -> None:
        if path.is_relative_to(folder.parent.parent):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, mode, **more)

    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", refuse)  # root, who may write everywhere, runs tests too
    return "cannot be used (Read-only file system)"


def make_writable_by_others(folder: Path, _: pytest.MonkeyPatch) -> str:
    folder.mkdir(parents=True)
    folder.chmod(0o1777)
    return "can be written by other users, who could put any code there"


def make_writable_by_a_group(folder: Path, _: pytest.MonkeyPatch) -> str:
    folder.mkdir(parents=True)
    folder.parent.parent.chmod(0o770)
    return "can be written by other users, who could put any code there"


def make_belong_to_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(parents=True)
    seen = Path.stat

    def stat_of_another(path: Path, **more: bool) -> os.stat_result:
        found = seen(path, **more)
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]]) if path == folder.parent else found

    monkeypatch.setattr(Path, "stat", stat_of_another)
    return "belongs to another user, who could put any code there"


def mount_noexec(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    found = os.statvfs("/")
    flags = {str(folder): os.ST_NOEXEC}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleStatvfs(flags.get(str(path), 0), found.f_frsize, 2**40))
    return "is on a file system mounted noexec"


def fill_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    free = {str(folder): 0}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleStatvfs(0, 4096, free.get(str(path), 2**40)))
    return "has less than 32 MiB of free space"


@dataclass
class SimpleStatvfs:
    f_flag: int
    f_frsize: int
    f_bavail: int


@pytest.mark.parametrize(
    "spoil",
    [
        *(make_unreadable, make_read_only, make_writable_by_others, make_writable_by_a_group),
        *(make_belong_to_another, mount_noexec, fill_disk),
    ],
)
def test_falls_back_to_private_temporary_folder(
    spoil: Callable[[Path, pytest.MonkeyPatch], str],
    places: tuple[Path, Path],
    source: Path,
    compiler: FakeCompiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = spoil(places[0], monkeypatch)
    first = build(source=source)
    assert isinstance(first, Built)
    assert first.path.parent == places[1]
    assert why in first.note
    assert build(source=source) == first
    assert len(compiler.started) == 1  # not for every model of a sweep
    assert reason(build(source=source, cache=places[0])) == (
        f"{first.note}; name a folder that only you can write in $HASHBENCH_CACHE"
    )


def test_nothing_loaded_from_folder_writable_by_others(
    places: tuple[Path, Path], source: Path, compiler: FakeCompiler
) -> None:
    path = built(build(source=source))
    path.chmod(0o666)
    assert stat.S_IMODE(built(build(source=source)).stat().st_mode) == 0o644
    assert len(compiler.started) == 2
    places[0].chmod(0o777)
    assert built(build(source=source)).parent == places[1]


@pytest.mark.usefixtures("compiler")
def test_library_in_read_only_folder_is_used(
    places: tuple[Path, Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = built(build(source=source))
    fill_disk(places[0], monkeypatch)
    assert build(source=source) == Built(path)


@pytest.mark.usefixtures("compiler")
def test_nothing_loaded_from_noexec_folder(
    places: tuple[Path, Path], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert built(build(source=source)).parent == places[0]
    mount_noexec(places[0], monkeypatch)
    assert built(build(source=source)).parent == places[1]


def test_full_disk_is_not_a_compiler_failure(places: tuple[Path, Path], source: Path, compiler: FakeCompiler) -> None:
    full = "error: error writing to /tmp/x.s: No space left on device"
    compiler.does(f"case $2 in {places[0]}*) echo '{full}' >&2; exit 1;; esac; {COPIES}")
    found = build(source=source)
    assert isinstance(found, Built)
    assert (found.path.parent, found.note) == (places[1], f"{places[0]} is full")
    assert list(places[0].glob("*.failed")) == []
