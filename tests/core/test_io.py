"""A file is replaced whole; what is not a file is never replaced by one. JSON is read as the dataclass that it says."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import socket
import stat
import threading
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from hashbench.core import io
from hashbench.core.errors import HashbenchError
from hashbench.core.io import from_json, refuse_unwritable, replace_file, to_json, write_file

Made = Callable[[Path], object]


def test_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("old")
    replace_file(tmp_path / "report", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report", "new")]


def test_special_file_is_written_to_and_kept(tmp_path: Path) -> None:
    # As root a rename onto /dev/null replaces the device of the whole machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    while True:  # until the reader is there
        with contextlib.suppress(HashbenchError):
            write_file(pipe, "through", tip="")
            break
    reader.join(120)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_pipe_without_reader_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(HashbenchError, match=r"cannot write .*: nobody reads from it"):
        write_file(pipe, "text", tip="")
    monkeypatch.setattr(io, "PIPE_SECONDS", 0.01)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(HashbenchError, match=r"nobody has read from it for 0\.01 s"):
        write_file(pipe, "x" * 2**20, tip="")
    os.close(reader)


def named_pipe(path: Path) -> None:
    os.mkfifo(path)


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


def untouched(path: Path) -> tuple[int, ...]:
    """What is at a path and when it was last changed; not when it was last read, which following a link changes."""
    about = os.lstat(path)
    return about.st_mode, about.st_ino, about.st_nlink, about.st_size, about.st_mtime_ns, about.st_ctime_ns


@pytest.mark.parametrize("make", [named_pipe, listening_socket, link_to_a_device])
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(io.read_file, id="read"),
        pytest.param(lambda path: io.replace_file(path, "text"), id="replaced"),
        pytest.param(lambda path: io.open_file(path, os.O_WRONLY | os.O_APPEND), id="appended to"),
        pytest.param(lambda path: io.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), id="emptied"),
    ],
)
def test_special_file_never_blocks(make: Made, use: Made, tmp_path: Path) -> None:
    make(tmp_path / "row.json")
    before = untouched(tmp_path / "row.json")
    with pytest.raises(io.NotRegularError, match=r"row\.json is a \w+( \w+)?, not a regular file"):
        use(tmp_path / "row.json")
    assert untouched(tmp_path / "row.json") == before
    assert io.file_digest(tmp_path / "row.json") == ""


def test_pipe_replacing_a_file_never_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at what is there and the opening."""
    looked_at, pipe, stat_of = tmp_path / "file", tmp_path / "pipe", os.stat
    looked_at.touch()
    os.mkfifo(pipe)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda at: stat_of(looked_at if at == pipe else at))
        with pytest.raises(io.NotRegularError):
            io.read_file(pipe)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report").write_text("old")

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "report", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report", "old")]


def test_write_file_writes_or_fails_in_one_line(tmp_path: Path) -> None:
    write_file(tmp_path / "new" / "report", "a\udcff", tip="Choose another.")
    assert (tmp_path / "new" / "report").read_text() == "a?"
    with pytest.raises(HashbenchError, match=r"cannot write .*below: .*\. Choose another\."):
        write_file(tmp_path / "new" / "report" / "below", "text", tip="Choose another.")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    target, link = tmp_path / "kept" / "report", tmp_path / "report"
    link.symlink_to(target)
    replace_file(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_link_is_refused_where_it_may_be_another_s(tmp_path: Path) -> None:
    target, link = tmp_path / "precious", tmp_path / "report"
    target.write_text("old")
    link.symlink_to(target)
    with pytest.raises(OSError, match="report is a symbolic link"):
        replace_file(link, "new", links=False)
    assert (link.is_symlink(), target.read_text(), len(list(tmp_path.iterdir()))) == (True, "old", 2)


def test_a_planted_temporary_file_is_never_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither under a name that can be guessed, nor under the one that is drawn."""
    (tmp_path / "precious").write_text("old")
    (tmp_path / f".report.{os.getpid()}.tmp").symlink_to("precious")
    replace_file(tmp_path / "report", "new")
    monkeypatch.setattr(io.secrets, "token_hex", lambda _: "drawn")
    (tmp_path / ".report.drawn.tmp").symlink_to("precious")
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "report", "newer")
    assert [(tmp_path / name).read_text() for name in ("precious", "report")] == ["old", "new"]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, "text")
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Wheel:
    size: float
    spokes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cart:
    name: str
    wheels: tuple[Wheel, ...]
    spare: Wheel | None
    marks: Mapping[str, tuple[int, int]]
    anything: object = None


CART = Cart("red", (Wheel(1.5, (1, 2)), Wheel(2.0)), None, {"left": (1, 2)}, [1, {"a": None}])
DOCUMENT = json.dumps(to_json(CART))


def test_a_dataclass_comes_back_from_json() -> None:
    assert from_json(Cart, json.loads(DOCUMENT)) == CART


def test_a_whole_number_may_stand_for_a_float() -> None:
    found = from_json(Wheel, {"size": 2, "spokes": []})
    assert (found, type(found.size)) == (Wheel(2.0), float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "cart.name is 'None', which is not str"),
        ({"wheels": {}}, "cart.wheels is '{}', which is not list"),
        ({"wheels": [{"size": True, "spokes": []}]}, "cart.wheels[0].size is 'True', which is not float"),
        ({"wheels": [{"spokes": []}]}, "cart.wheels[0] lacks the fields size"),
        ({"spare": 3}, "cart.spare is '3', which is not dict"),
        ({"marks": {"left": [1, 2, 3]}}, "cart.marks['left'] has 3 items instead of 2"),
        ({"more": 1}, "cart has unknown fields: more"),
    ],
    ids=["no text", "no list", "a bool", "a missing field", "no object", "too many items", "an unknown field"],
)
def test_json_of_another_form_is_refused_in_one_line(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=r"\A.*\Z") as raised:
        from_json(Cart, {**json.loads(DOCUMENT), **change}, where="cart")
    assert str(raised.value) == words


def test_json_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\ACart is 'None', which is not dict\Z"):
        from_json(Cart, None)


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


def test_json_without_a_type_is_refused_where_it_is_deep() -> None:
    assert from_json(Cart, {**json.loads(DOCUMENT), "anything": nested(25)}).anything == nested(25)
    with pytest.raises(ValueError, match=r"\Acart\.anything is nested deeper than 50 levels\Z"):
        from_json(Cart, {**json.loads(DOCUMENT), "anything": nested(26)}, where="cart")


PACKED = gzip.compress(b"text" * 99)
DAMAGED_TEXTS = {
    "no text": (b"\xff\xfe{}\n", "it is not a text file"),
    "half of gzip": (PACKED[:-20], "it is truncated"),
    "gzip with a bit changed": (PACKED[:-8] + b"\0" * 8, "it is damaged"),
    "gzip and more": (PACKED + b"more", "data follow the end"),
    "compressed twice": (gzip.compress(PACKED), "it is not a text file"),
}


@pytest.mark.parametrize(("content", "words"), DAMAGED_TEXTS.values(), ids=DAMAGED_TEXTS)
def test_text_that_is_damaged_is_refused_in_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=rf"\A[^\n]*{words}[^\n]*\Z"):
        io.read_text(tmp_path / "a", most=2**20)


def test_decompression_stops_at_the_limit(tmp_path: Path) -> None:
    packed = gzip.compress(bytes(2**26))
    (tmp_path / "bomb.gz").write_bytes(packed[:-4] + (1024).to_bytes(4, "little"))  # as if it were 1 KiB of text
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"bomb\.gz has more than 8 MiB of text"):
            io.read_text(tmp_path / "bomb.gz", most=2**23)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_text_is_read_with_and_without_compression(tmp_path: Path) -> None:
    text = "é\r\n" * 100
    for name in ("a.txt", "a.txt.gz"):
        (tmp_path / name).write_bytes(io.bytes_for(tmp_path / name, text))
        assert io.read_text(tmp_path / name, most=400) == text
        with pytest.raises((OSError, ValueError), match="has more than"):
            io.read_text(tmp_path / name, most=399)
    assert (tmp_path / "a.txt").read_bytes() == text.encode()
    assert (tmp_path / "a.txt.gz").read_bytes().startswith(io.GZIP)


@pytest.mark.parametrize(
    ("path", "folder", "number"),
    [
        pytest.param("new/file", False, None, id="new file"),
        pytest.param("file", False, None, id="file that is replaced"),
        pytest.param("dir", False, errno.EISDIR, id="file where a folder is"),
        pytest.param("file/below", False, errno.ENOTDIR, id="file below a file"),
        pytest.param("/dev/full", False, None, id="device"),
        pytest.param("new/folder", True, None, id="new folder"),
        pytest.param("dir", True, None, id="folder that is filled"),
        pytest.param("file", True, errno.EEXIST, id="folder where a file is"),
        pytest.param("file/below", True, errno.ENOTDIR, id="folder below a file"),
    ],
)
def test_what_cannot_be_written_shows_before_anything_is(
    path: str, folder: bool, number: int | None, tmp_path: Path
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    found = None
    try:
        refuse_unwritable(tmp_path / path, folder=folder)
    except OSError as error:
        found = error.errno
    assert found == number
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dir", "file"]


def test_a_folder_that_may_not_be_written_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    for path, folder in (("new", False), ("new/further", True)):
        with pytest.raises(PermissionError):
            refuse_unwritable(tmp_path / path, folder=folder)
