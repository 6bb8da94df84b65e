"""Compiles the native recorder for the torch of this process, or finds what was compiled before.

The headers come from torch's own wheel; no headers of Python are needed. Flags are portable: the library runs on every
processor of the architecture, so that machines that share a home can share it.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hashbench.native import cache as caches
from hashbench.native.cache import Failure, UnusableFolderError
from hashbench.processes import describe_end, python_calling, run, tell_phase
from hashbench.text import one_line, shorten

RECORDER = Path(__file__).with_name("recorder.cpp")
"""The recorder's source: one file, beside torch's headers and the standard library's."""

TRIAL = "hashbench.trace.native:trial"
"""Tries the recorder in a process of its own (see :func:`build`)."""

COMPILERS = ("c++", "g++", "clang++")
"""Tried in this order, unless ``$CXX`` names one."""

BUILD_SECONDS = 300.0
"""How long one compiler may take, which needs 10 to 25 s of CPU: beside busy neighbours that can be minutes."""

TRIAL_SECONDS = 120.0
"""How long a fresh process may take that imports torch and tries a library."""

RETRY = "name another compiler in $CXX; `hashbench native` tries again"
"""What a user does about a failure that is remembered."""

_ERROR = re.compile(r"\berror:|undefined (reference|symbol)|cannot find -l|No space left|[Qq]uota exceeded")
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Built:
    """A library that is whole and that nobody else can have written.

    Attributes:
        path: the shared library.
        note: why it does not lie in the user's cache folder; empty where it does.
    """

    path: Path
    note: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """There is no library: ``what`` is wrong, and what a user does about it; both without a full stop."""

    what: str
    advice: str

    @property
    def reason(self) -> str:
        """Both as one sentence without its full stop."""
        return f"{self.what}; {self.advice}"


def build(
    *, cache: Path | None = None, source: Path = RECORDER, trial: str = "", retry: bool = False
) -> Built | Unavailable:
    """The library compiled from ``source`` for the torch of this process: found in the cache, or compiled now, which
    takes seconds. Processes that ask at the same time wait for one of them. Only ``KeyboardInterrupt`` is raised.

    Args:
        cache: the folder that holds libraries; by default the first of ``cache.folders`` that can be used.
        source: one C++ file.
        trial: ``module:function`` of this package, which a fresh Python calls with the path of what was just compiled;
            a library that ends that process, or for which the function does not return 0, is not kept.
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
        with _noting(unusable):
            folder = caches.opened(place)
            if folder and (found := caches.find(folder, recipe.prefix)):
                return Built(found, "; ".join(unusable))
            if compilers:
                return _build_in(caches.made(place), recipe, compilers, retry=retry, note="; ".join(unusable))
    if without:
        return Unavailable(without, "install one, or name it in $CXX")
    return Unavailable(" and ".join(unusable), f"name a folder that only you can write in ${caches.VARIABLE}")


@contextlib.contextmanager
def _noting(unusable: list[str]) -> Iterator[None]:
    """A context that ends, with a note, where a folder turns out to be unusable."""
    try:
        yield
    except UnusableFolderError as error:
        unusable.append(str(error))


def _build_in(
    folder: Path, recipe: Recipe, compilers: Sequence[Compiler], *, retry: bool, note: str
) -> Built | Unavailable:
    """The library in a folder that can be written, unless the same compilers have failed to make it."""
    tried = " ".join(compiler.identity for compiler in compilers)
    with caches.alone(folder, seconds=BUILD_SECONDS):
        if found := caches.find(folder, recipe.prefix):  # another process has made it meanwhile
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
        caches.remember_failure(folder, recipe.prefix, Failure(tried, what))
        return Unavailable(what, RETRY)


# ------------------------------------------------------------------------------------------------------- compiling


class _CompilerError(Exception):
    """What a compiler said first, or what is wrong with its library, on one line."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """The beginning of a command line, and which program that is now: path, size and time."""

    command: tuple[str, ...]
    identity: str

    @classmethod
    def of(cls, command: Sequence[str], program: Path) -> Compiler:
        """The compiler ``command``, whose first word was found as ``program``."""
        real = program.resolve()
        found = real.stat()
        return cls(tuple(command), f"{real}:{found.st_size}:{found.st_mtime_ns}:{shlex.join(command[1:])}")


def find_compilers() -> tuple[Compiler, ...]:
    """The C++ compilers to try in turn: what ``$CXX`` names (it may have arguments), else each of :data:`COMPILERS`
    that is another program than those before it.

    Raises:
        ValueError: there is none; the message says where it was looked for.
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
    """The library in ``folder``, compiled just now.

    Raises:
        _CompilerError: there is none.
        UnusableFolderError: the folder is full, or cannot be written any more.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=caches.SCRATCH, dir=folder, ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            tell_phase("compiling the native tracer, once for this torch")
            # What was read before, not the file: an update may have replaced that meanwhile.
            (scratch / recipe.source).write_bytes(recipe.content)
            product = scratch / "library.so"
            _run(recipe.command(compiler, scratch, product), scratch)
            if recipe.trial:
                _try(product, recipe.trial)
            return caches.store(product, folder, recipe.prefix)
    except OSError as error:
        raise UnusableFolderError(f"{folder} cannot be written ({error.strerror})") from error


def _run(command: Sequence[str], scratch: Path) -> None:
    """Run a compiler, which ends with all that it has started when its time is over, or when Ctrl-C is pressed."""
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
    """Try a library where it can do no harm: with a torch that it does not know, it could end this process."""
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
    """What a library is made of, and the beginning of its file's name, which another source, another torch or another
    architecture changes."""

    source: str
    content: bytes
    prefix: str
    trial: str

    @classmethod
    def of(cls, source: Path, trial: str) -> Recipe:
        """The recipe for the torch of this process. Raises ``OSError`` where the source or files of torch's are
        missing."""
        content = source.read_bytes()
        parts = [hashlib.sha256(content).hexdigest(), _compile_flags(), LINK_FLAGS, _torch_identity(), _machine()]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return cls(source.name, content, f"{source.stem}-{key[:16]}", trial)

    def command(self, compiler: Compiler, scratch: Path, product: Path) -> list[str]:
        """The command line that compiles the copy of the source in ``scratch`` to ``product``."""
        include, libraries = _torch_folder("include"), _torch_folder("lib")
        paths = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{libraries}"]
        paths.append(f"-ffile-prefix-map={scratch}=.")  # torch's assertions show the names of files
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
    # Torch's libraries are in the process already and are found by their names: nothing says where they lie. Python's
    # symbols are in the process without a library that could be named.
    ("-undefined", "dynamic_lookup")
    if sys.platform == "darwin"
    else ("-Wl,--as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python")
)


def _compile_flags() -> list[str]:
    """Without ``-march``: the library is to run on all machines that share a home. NDEBUG as torch was built.
    ``$HASHBENCH_CXXFLAGS`` is added, such as ``-fsanitize=address`` for a run of the tests."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    more = [] if torch.version.debug else ["-DNDEBUG"]
    more += shlex.split(os.environ.get("HASHBENCH_CXXFLAGS", ""))
    return ["-std=c++20", "-O2", "-fPIC", "-shared", abi, *more]


def _torch_folder(name: str) -> Path:
    """A folder of the torch in use; :mod:`torch.utils.cpp_extension` needs 60 ms to import, and prints about CUDA."""
    return Path(torch.__file__).parent / name


def _torch_identity() -> list[str]:
    """What tells this torch from others; the sizes of its libraries tell builds of one changed checkout apart."""
    names, folder = ("libc10", "libtorch_cpu"), _torch_folder("lib")
    libraries = [min(folder.glob(f"{name}.*"), default=folder / name) for name in names]
    sizes = [str(path.stat().st_size) for path in (*libraries, _torch_folder("include") / "torch" / "library.h")]
    return [torch.__version__, str(torch.version.git_version), *sizes]


def _machine() -> list[str]:
    """The architecture, the Python, and the C and C++ libraries in use: what was compiled with newer ones may not
    load."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    return [
        sys.platform,
        platform.machine(),
        f"{sys.implementation.cache_tag}{sys.abiflags}",
        libc or "",
        _cpp_library(),
    ]


def _cpp_library() -> str:
    """The C++ library that this process has loaded (``libstdc++.so.6.0.30``); empty where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            if "/libstdc++.so" in line:
                return line.rpartition("/")[2]
    return ""
