"""Which ops are replayed: the rule held against every op that torch registers."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hashbench.core.diagnose.calls.capture import CaptureError, capture
from hashbench.core.diagnose.calls.ops import (
    MODE_ARGUMENTS,
    OTHER_NAMESPACES,
    TENSOR_NAMESPACES,
    UNCHECKED,
    path_among,
    why_refused,
    why_unchecked,
    why_undefined,
)

aten: Any = torch.ops.aten


def overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), which or "default")


def registered(*namespaces: str) -> Iterator[Any]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.partition("::")[0] in namespaces:
            yield overload(name)


def texts_of(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments if "str" in str(argument.type)}


def has_tensors(func: Any) -> bool:
    return "Tensor" in str(func._schema)


REFUSED_TEXTS = {"aten.from_file.default", "aten.from_file.out", "aten._print.default", "_test.get_first.default"}


def test_exactly_tensor_ops_of_torch_are_replayed() -> None:
    # Names of dimensions, which torch 2.11 still has, are refused like other texts.
    named = re.compile("(out|end|start)?_?dims?[012]?|names|order")
    funcs = [func for func in registered(*TENSOR_NAMESPACES) if not any(map(named.fullmatch, texts_of(func)))]
    reasons = {str(func): why_refused(func) for func in funcs}
    assert len(reasons) > 3000, "the registry was not read"
    refused = {name for name, reason in reasons.items() if reason}
    without = {str(func) for func in funcs if not has_tensors(func)}
    objects = re.compile("Any|torch.classes")  # of packed weights: they say nothing of tensors
    assert {name for name in refused - without if not objects.search(str(schema_of(name)))} <= REFUSED_TEXTS
    assert without <= refused
    assert {name for name, reason in reasons.items() if "file, a process" in reason} <= REFUSED_TEXTS


def schema_of(name: str) -> Any:
    namespace, packet, which = name.split(".")
    return overload(f"{namespace}::{packet}.{which}")._schema


def test_string_arguments_are_in_the_tables() -> None:
    taken = {text for func in registered(*TENSOR_NAMESPACES) if not why_refused(func) for text in texts_of(func)}
    assert taken <= MODE_ARGUMENTS
    assert not {text for text in taken if re.search("file|path|dir|url|host|group|lib|name$", text)} - {
        "post_op_name",
        "api_name",
    }


def test_no_op_of_another_namespace_is_replayed() -> None:
    assert not [str(func) for func in registered(*OTHER_NAMESPACES) if not why_refused(func)]


ALLOWED = (
    *("aten.add.Tensor", "aten.randn.default", "aten.empty.memory_format", "aten.sym_size.int", "aten.einsum.default"),
    *("aten.scatter_reduce.two", "aten.div.Tensor_mode", "aten._convolution_mode.default", "aten.stft.center"),
    *("aten.linalg_norm.ord_str", "aten.searchsorted.Tensor", "aten._test_string_default.default"),
    *("prims.add.default", "quantized.linear.default", "mkldnn._linear_pointwise.default"),
)
DENIED = {
    "aten.from_file.default": "may name a file",
    "aten.from_file.out": "may name a file",
    "aten._print.default": "may name a file",
    "aten.save.default": "not an op that the dispatcher calls",
    "aten._assert_scalar.default": "neither takes nor returns a tensor",
    "prim.device.default": "not an op that the dispatcher calls",
    "profiler._record_function_enter_new.default": "files among them",
    "symm_mem.one_shot_all_reduce.default": "works with other processes",
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_text_that_is_a_mode_is_no_reason(name: str) -> None:
    namespace, packet, which = name.split(".")
    assert why_refused(getattr(getattr(getattr(torch.ops, namespace), packet), which)) == ""


@pytest.mark.parametrize(("name", "words"), DENIED.items(), ids=list(DENIED))
def test_other_ops_are_refused_with_reason(name: str, words: str) -> None:
    namespace, packet, which = name.split(".")
    assert words in why_refused(getattr(getattr(getattr(torch.ops, namespace), packet), which))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_collectives_are_refused() -> None:
    for namespace in ("c10d", "_c10d_functional"):
        assert [why_refused(func) for func in registered(namespace)].count("") == 0


@pytest.mark.slow
def test_torchvision_file_ops_are_refused() -> None:
    pytest.importorskip("torchvision")
    refused = {str(func) for func in registered("torchvision", "image") if why_refused(func) and has_tensors(func)}
    assert refused <= {"image.read_file.default", "image.write_file.default"}
    assert not why_refused(torch.ops.torchvision.nms.default)


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    library = torch.library.Library("hashbench_which", "DEF")
    for schema in ("scaled(Tensor x, str layer_name) -> Tensor", "kept(Tensor x, str out_path) -> Tensor"):
        library.define(schema)
        library.impl(schema.partition("(")[0], lambda x, _: x.clone(), "CPU")
    yield torch.ops.hashbench_which
    library._destroy()


def test_custom_op_takes_names_but_no_paths(own: Any) -> None:
    assert why_refused(own.scaled.default) == ""
    assert "'out_path'" in why_refused(own.kept.default)
    assert path_among(own.scaled.default, ["layers.0.mlp", 1, None]) == ""
    for path in ("/etc/passwd", "../x", "a\\b", "~", "..", "a\0b"):
        assert "reads as the path of a file" in path_among(own.scaled.default, [1, path])
    assert path_among(aten.einsum.default, ["i/j"]) == "", "torch reads it as a mode, whatever it is"


def test_such_a_call_is_not_captured_either(tmp_path: Any) -> None:
    file = tmp_path / "made"
    with pytest.raises(
        CaptureError, match=r"aten\.from_file\.default takes a text that may name a file.*only ops that"
    ):
        capture(aten.from_file.default, (str(file), True, 8), {}, limit_bytes=2**20)
    assert not file.exists()


_NAMESPACES = "import torch; print(*sorted({s.name.partition('::')[0] for s in torch._C._jit_get_all_schemas()}))"


@pytest.mark.slow
def test_every_torch_namespace_is_in_a_table() -> None:
    said = subprocess.run([sys.executable, "-P", "-c", _NAMESPACES], capture_output=True, text=True, check=True)
    assert set(said.stdout.split()) <= TENSOR_NAMESPACES | OTHER_NAMESPACES.keys()
    assert not TENSOR_NAMESPACES & OTHER_NAMESPACES.keys()


@pytest.mark.parametrize("name", UNCHECKED)
def test_unchecked_ops_are_captured(name: str) -> None:
    namespace, _, packet = name.partition("::")
    overloads = getattr(getattr(torch.ops, namespace), packet).overloads()
    funcs = [overload(f"{name}.{which}") for which in overloads]
    assert funcs
    assert all(why_unchecked(func) and not why_refused(func) for func in funcs)


def test_checked_twins_are_replayed_from_files() -> None:
    for name in ("max_unpool2d", "embedding_dense_backward", "take", "index_put_", "nll_loss_backward", "gather"):
        assert why_unchecked(overload(f"aten::{name}")) == "", name


def far(*shape: int) -> torch.Tensor:
    return torch.full(shape, 2**40)


CRASHING: dict[str, Callable[[], object]] = {
    "max_pool2d_with_indices_backward": lambda: aten.max_pool2d_with_indices_backward(
        torch.rand(1, 1, 2, 2), torch.rand(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, far(1, 1, 2, 2)
    ),
    "adaptive_max_pool2d_backward": lambda: aten.adaptive_max_pool2d_backward(
        torch.rand(1, 1, 2, 2), torch.rand(1, 1, 4, 4), far(1, 1, 2, 2)
    ),
    "_ctc_loss": lambda: aten._ctc_loss(torch.rand(4, 1, 3), far(1, 2), [4], [2]),
    "_embedding_bag_dense_backward": lambda: aten._embedding_bag_dense_backward(
        torch.rand(2, 3), far(4), far(4), far(2), far(2, 3), 4, False, 0, None
    ),
    "_segment_reduce_backward": lambda: aten._segment_reduce_backward(
        torch.rand(2), torch.rand(2), torch.rand(4), "sum", lengths=far(2)
    ),
    "_convert_indices_from_coo_to_csr": lambda: aten._convert_indices_from_coo_to_csr(far(5), 4),
}


@pytest.mark.parametrize("name", CRASHING)
def test_an_op_is_refused_since_it_crashes(name: str) -> None:
    """One that no longer does can leave the table.

    What is written out of bounds meets an unmapped page, or the allocator's own data, for which glibc aborts.
    """
    assert f"aten::{name}" in UNCHECKED
    child = os.fork()
    if not child:
        faulthandler.disable()
        torch.set_num_threads(1)
        with contextlib.suppress(BaseException), torch.no_grad():
            CRASHING[name]()
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)


@torch.library.custom_op("test_ops::written", mutates_args=())
def written(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


TYPED = """
@torch.library.custom_op("test_ops::typed", mutates_args=())
def typed(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""


def test_an_op_that_no_new_process_can_define_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    exec(compile(TYPED, "<stdin>", "exec"), {"torch": torch})
    assert why_undefined(aten.add.Tensor) == ""
    assert why_undefined(torch.ops.test_ops.written.default) == ""
    assert why_undefined(torch.ops.test_ops.typed.default).startswith("no file defines test_ops::typed, as in an inter")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    why = why_undefined(torch.ops.test_ops.written.default)
    assert why.startswith("test_ops.py defines test_ops::written, and is the running program; put it into another ")
