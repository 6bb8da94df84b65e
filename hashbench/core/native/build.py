"""Compile the native recorder for the torch of this process, or find it in the cache.

The headers come from torch's own wheel; no Python headers are needed. Flags are portable: the library runs on every
processor of the architecture, so machines with a shared home can share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hashbench.core.native import cache as caches
from hashbench.core.native.cache import BuildFailure, UnusableFolderError
from hashbench.core.processes import describe_end, python_calling, run, tell_phase
from hashbench.core.text import one_line, shorten

RECORDER = Path(__file__).with_name("recorder.cpp")
"""Source of the recorder: this file and the headers beside it, besides torch's and the standard library's."""

TRIAL = "hashbench.core.trace.native:trial"
"""Test of the recorder in a subprocess (see :func:`build`)."""

COMPILERS = ("c++", "g++", "clang++")
"""Compilers in order of preference, unless ``$CXX`` names one."""

BUILD_SECONDS = 300.0
"""Timeout of one compiler, which needs 10 to 25 s of CPU: minutes on a busy machine."""

TRIAL_SECONDS = 120.0
"""Timeout of a subprocess that imports torch and tests a library."""

RETRY = "name another compiler in $CXX; `hashbench native` tries again"
"""Advice for a remembered failure."""

_ERROR = re.compile(r"\berror:|undefined (reference|symbol)|cannot find -l|No space left|[Qq]uota exceeded")
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Built:
    """Verified library that no other user can have written.

    Attributes:
        path: the shared library.
        note: why it is not in the user's cache folder; ``""`` if it is.
    """

    path: Path
    note: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No library: ``what`` is wrong, and the user's remedy, both without a full stop."""

    what: str
    advice: str

    @property
    def reason(self) -> str:
        """Both as one sentence without its full stop."""
        return f"{self.what}; {self.advice}"


def build(
    *, cache: Path | None = None, source: Path = RECORDER, trial: str = "", retry: bool = False
) -> Built | Unavailable:
    """Return the library of ``source`` for the torch of this process, from the cache or compiled now (takes seconds).

    Concurrent processes wait for one of them. Raises only ``KeyboardInterrupt``.

    Args:
        cache: folder of libraries; default: the first usable one of ``cache.folders``.
        source: C++ file, compiled with the headers (``*.h``) in its folder.
        trial: ``module:function`` of this package, which a fresh Python calls with the path of the compiled library; a
            library that crashes that process, or for which the function does not return 0, is discarded.
        retry: compile although the same compilers failed within the last day.
    """
    try:
        recipe = Recipe.of(source, trial)
    except OSError as error:
        what = f"{error.filename} cannot be read ({error.strerror})"
        return Unavailable(what, "install hashbench and torch again")
    compilers: tuple[Compiler, ...] = ()
    without = ""
    try:
        compilers = find_compilers()
    except (OSError, ValueError) as error:
        without = str(error)
    unusable: list[str] = []
    for place in caches.folders(cache):
        with _collect_unusable(unusable):
            folder = caches.resolve(place)
            if folder and (found := caches.find(folder, recipe.prefix)):
                return Built(found, "; ".join(unusable))
            if compilers:
                return _build_in(
                    caches.resolve_or_create(place), recipe, compilers, retry=retry, note="; ".join(unusable)
                )
    if without:
        return Unavailable(without, "install one, or name it in $CXX")
    return Unavailable(" and ".join(unusable), f"name a folder that only you can write in ${caches.VARIABLE}")


@contextlib.contextmanager
def _collect_unusable(unusable: list[str]) -> Iterator[None]:
    """Catch the error of an unusable folder, and append its message."""
    try:
        yield
    except UnusableFolderError as error:
        unusable.append(str(error))


def _build_in(
    folder: Path, recipe: Recipe, compilers: Sequence[Compiler], *, retry: bool, note: str
) -> Built | Unavailable:
    """Find or compile the library in a writable folder, unless the same compilers have failed before."""
    tried = " ".join(compiler.identity for compiler in compilers)
    with caches.locked(folder, seconds=BUILD_SECONDS):
        if found := caches.find(folder, recipe.prefix):  # another process was faster
            return Built(found, note)
        if not retry and (what := caches.failure(folder, recipe.prefix, tried)):
            return Unavailable(what, RETRY)
        reasons = []
        for compiler in compilers:
            try:
                return Built(_compile(folder, recipe, compiler), note)
            except _CompilerError as error:
                reasons.append(f"{shlex.join(compiler.command)}: {error}")
        what = f"the native recorder cannot be built ({'; '.join(reasons)})"
        caches.remember_failure(folder, recipe.prefix, BuildFailure(tried, what))
        return Unavailable(what, RETRY)


# ------------------------------------------------------------------------------------------------------- compiling


class _CompilerError(Exception):
    """First error of a compiler, or the fault of its library, on one line."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Start of a command line, and the identity of its program: path, size and mtime."""

    command: tuple[str, ...]
    identity: str

    @classmethod
    def of(cls, command: Sequence[str], program: Path) -> Compiler:
        """Return the compiler ``command``, whose first word was resolved to ``program``."""
        real = program.resolve()
        found = real.stat()
        return cls(tuple(command), f"{real}:{found.st_size}:{found.st_mtime_ns}:{shlex.join(command[1:])}")


def find_compilers() -> tuple[Compiler, ...]:
    """Return the C++ compilers to try in turn: ``$CXX`` (which may have arguments), else each distinct program of
    :data:`COMPILERS`.

    Raises:
        ValueError: none was found; the message says where it was looked for.
    """
    chosen = os.environ.get("CXX", "").strip()
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]
    except ValueError as error:
        raise ValueError(f"$CXX is {chosen!r} ({error})") from error
    compilers: dict[str, Compiler] = {}
    for command in commands:
        if found := shutil.which(command[0]):
            compiler = Compiler.of(command, Path(found))
            compilers.setdefault(compiler.identity, compiler)
    if not compilers:
        names = f"named {chosen!r} by $CXX" if chosen else f"({', '.join(COMPILERS)})"
        raise ValueError(f"there is no C++ compiler {names}")
    return tuple(compilers.values())


def _compile(folder: Path, recipe: Recipe, compiler: Compiler) -> Path:
    """Compile the library into ``folder``.

    Raises:
        _CompilerError: it failed.
        UnusableFolderError: the folder is full, or no longer writable.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=caches.SCRATCH, dir=folder, ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            tell_phase("compiling the native tracer, once for this torch")
            # The texts read before, not the files: an update may have replaced them.
            for file, content in recipe.files.items():
                (scratch / file).write_bytes(content)
            product = scratch / "library.so"
            _run(recipe.command(compiler, scratch, product), scratch)
            if recipe.trial:
                _try(product, recipe.trial)
            return caches.store(product, folder, recipe.prefix)
    except OSError as error:
        raise UnusableFolderError(f"{folder} cannot be written ({error.strerror})") from error


def _run(command: Sequence[str], scratch: Path) -> None:
    """Run a compiler; kill it with its children on timeout or Ctrl-C."""
    try:
        done = run(command, seconds=BUILD_SECONDS, environment={"TMPDIR": str(scratch), "LC_ALL": "C"})
    except OSError as error:
        raise _CompilerError(f"it cannot be started: {error.strerror}") from error
    if done.status == 0 and (scratch / "library.so").is_file():
        return
    if caches.says_full(done.stderr):
        raise UnusableFolderError(f"{scratch.parent} is full")
    if done.status is None:
        raise _CompilerError(f"it had not finished after {BUILD_SECONDS:g} s")
    said = done.stderr.replace(f"{scratch}/", "").splitlines()
    first = next(filter(_ERROR.search, said), done.last_line if done.status else "it wrote no library")
    raise _CompilerError(shorten(one_line(first).strip(), _LONGEST_REASON))


def _try(product: Path, trial: str) -> None:
    """Test a library in a subprocess: with an unknown torch it could crash this one."""
    tell_phase("trying the native tracer")
    done = run(python_calling(trial, str(product)), seconds=TRIAL_SECONDS)
    if done.status == 0:
        return
    if done.status is None:
        said = f"not finished after {TRIAL_SECONDS:g} s"
    else:
        said = describe_end(done.status) if done.status < 0 else shorten(one_line(done.last_line), _LONGEST_REASON)
    raise _CompilerError(f"its library does not work with torch {torch.__version__}: {said}")


# ------------------------------------------------------------------------------------------------------ the recipe


@dataclass(frozen=True, slots=True)
class Recipe:
    """Inputs of a library, and the prefix of its file name, which depends on source, torch and architecture.

    Attributes:
        source: name of the file to compile.
        files: contents of that file and its headers, by name.
        prefix: start of the library's file name.
        trial: see :func:`build`.
    """

    source: str
    files: Mapping[str, bytes]
    prefix: str
    trial: str

    @classmethod
    def of(cls, source: Path, trial: str) -> Recipe:
        """Return the recipe for the torch of this process. Raises ``OSError`` if the source or torch's files are
        missing."""
        files = {path.name: path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))}
        contents = [(name, hashlib.sha256(content).hexdigest()) for name, content in files.items()]
        parts = [contents, _compile_flags(), LINK_FLAGS, _torch_identity(), _machine()]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return cls(source.name, files, f"{source.stem}-{key[:16]}", trial)

    def command(self, compiler: Compiler, scratch: Path, product: Path) -> list[str]:
        """Return the command line that compiles the copy of the source in ``scratch`` to ``product``."""
        include, libraries = _torch_folder("include"), _torch_folder("lib")
        paths = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{libraries}"]
        paths.append(f"-ffile-prefix-map={scratch}=.")  # torch's assertions print file names
        return [
            *compiler.command,
            *_compile_flags(),
            *paths,
            str(scratch / self.source),
            "-o",
            str(product),
            *LINK_FLAGS,
        ]


LINK_FLAGS = (
    # Torch's libraries are loaded already and found by soname: no rpath. Python's symbols are in the process without a
    # library to link.
    ("-undefined", "dynamic_lookup")
    if sys.platform == "darwin"
    else ("-Wl,--as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python")
)


def _compile_flags() -> list[str]:
    """Return the compiler's flags: without ``-march``, since machines may share a home; NDEBUG as torch was built.
    ``$HASHBENCH_CXXFLAGS`` is appended, such as ``-fsanitize=address`` for a run of the tests."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    more = [] if torch.version.debug else ["-DNDEBUG"]
    more += shlex.split(os.environ.get("HASHBENCH_CXXFLAGS", ""))
    return ["-std=c++20", "-O2", "-fPIC", "-shared", abi, *more]


def _torch_folder(name: str) -> Path:
    """Return a folder of the torch in use; :mod:`torch.utils.cpp_extension` needs 60 ms to import, and prints about
    CUDA."""
    return Path(torch.__file__).parent / name


def _torch_identity() -> list[str]:
    """Identify this torch; the sizes of its libraries distinguish builds of one modified checkout."""
    names, folder = ("libc10", "libtorch_cpu"), _torch_folder("lib")
    libraries = [min(folder.glob(f"{name}.*"), default=folder / name) for name in names]
    sizes = [str(path.stat().st_size) for path in (*libraries, _torch_folder("include") / "torch" / "library.h")]
    return [torch.__version__, str(torch.version.git_version), *sizes]


def _machine() -> list[str]:
    """Identify architecture, Python, and the C and C++ libraries: a library compiled with newer ones may not load."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    return [
        sys.platform,
        platform.machine(),
        f"{sys.implementation.cache_tag}{sys.abiflags}",
        libc or "",
        _cpp_library(),
    ]


def _cpp_library() -> str:
    """Return the C++ library loaded in this process (``libstdc++.so.6.0.30``); ``""`` if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            if "/libstdc++.so" in line:
                return line.rpartition("/")[2]
    return ""
