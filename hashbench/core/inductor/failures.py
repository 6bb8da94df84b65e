"""Which stage of the compiler raised an exception, from the types in its chain of causes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_STAGES = (
    ("LoweringException", "lowering"),
    ("MissingOperatorWithDecomp", "lowering"),
    ("MissingOperatorWithoutDecomp", "lowering"),
    ("CppCompileError", "codegen"),
    ("CppWrapperCodegenError", "codegen"),
    ("CUDACompileError", "codegen"),
    ("TritonMissing", "codegen"),
    ("InvalidCxxCompiler", "codegen"),
    ("SubgraphLoweringException", "lowering"),
    ("Unsupported", "dynamo"),
    ("TorchRuntimeError", "dynamo"),
    ("UserError", "dynamo"),
    ("InternalTorchDynamoError", "dynamo"),
    ("FailOnRecompileLimitHit", "dynamo"),
)
"""Names of exception types of ``torch._inductor.exc`` and ``torch._dynamo.exc``, and the stage that raises them."""

_TARGET = re.compile(r"^\s*target: (?P<op>[\w.]+)", re.MULTILINE)
_FOLDERS = (
    ("/torch/_inductor/fx_passes/post_grad", "post_grad_passes"),
    ("/torch/_inductor/fx_passes/joint_graph", "joint_graph_passes"),
    ("/torch/_inductor/decomposition", "decomposition"),
    ("/torch/_decomp/", "decomposition"),
    ("/torch/_inductor/lowering", "lowering"),
    ("/torch/_inductor/codegen/", "codegen"),
    ("/torch/_inductor/", "lowering"),
    ("/torch/_functorch/", "aot_autograd"),
    ("/torch/_dynamo/", "dynamo"),
)
"""Parts of the path of a frame, and their stage; the innermost frame that has one decides."""


@dataclass(frozen=True, slots=True)
class CompilerFailure:
    """Where a compiled run failed.

    Attributes:
        stage: of the compiler; ``runtime`` if compiled code raised.
        op: that was being compiled; empty if unknown.
    """

    stage: str
    op: str = ""


def failed_in(error: BaseException) -> CompilerFailure:
    """Return the stage and the op of an exception that a compiled run raised."""
    chain = list(_chain(error))
    op = next((found["op"] for exception in chain if (found := _TARGET.search(str(exception)))), "")
    names = [kind.__name__ for exception in chain for kind in type(exception).__mro__]
    for name, stage in _STAGES:
        if name in names:
            return CompilerFailure(stage, op)
    compiling = "BackendCompilerFailed" in names or "InductorError" in names
    innermost = [path for exception in reversed(chain) for path in _paths(exception)]
    if not compiling:
        return CompilerFailure("runtime", op)
    stages = (stage for path in innermost for part, stage in _FOLDERS if part in path)
    return CompilerFailure(next(stages, "dynamo"), op)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and what it was raised from, the outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _paths(error: BaseException) -> list[str]:
    """Return the files of the frames of its traceback, the innermost first."""
    paths, traceback = [], error.__traceback__
    while traceback is not None:
        paths.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    return paths[::-1]
