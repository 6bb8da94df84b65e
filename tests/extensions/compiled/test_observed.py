"""What an observer is shown of a generated module: kernels and ops, by the names of its buffers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hashbench.core.inductor.graphs import CompiledGraph, KernelCall
from hashbench.core.inductor.internals import KernelSite, TritonLaunch
from hashbench.core.trace.generated import kernel_at
from hashbench.extensions.compiled.observed import KernelWatcher

aten: Any = torch.ops.aten
KERNELS = """\
cpp_fused_sin_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], r'''
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0) { out_ptr0[0] = in_ptr0[0]; }
''')
cpp_fused_add_1 = async_compile.cpp_pybinding(['float*', 'const float*'], r'''
extern "C"  void  kernel(float* in_out_ptr0, const float* in_ptr0)
{
    auto tmp0 = in_out_ptr0[x0];
    in_out_ptr0[x0] = tmp0 + in_ptr0[x0];
}
''')
"""
TYPES = {"cpp_fused_sin_0": ("const float*", "float*", "const int64_t"), "cpp_fused_add_1": ("float*", "const float*")}


def sine(x: torch.Tensor, out: torch.Tensor, _: int) -> None:
    torch.sin(x, out=out)


def add(x: torch.Tensor, y: torch.Tensor) -> None:
    x += y


@dataclass
class Seen:
    """Observer that notes what it is shown."""

    notes: list[str] = field(default_factory=list)
    calls: list[KernelCall] = field(default_factory=list)

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:
        self.notes.append(f"begin {Path(graph.path).name} {len(inputs)}")
        try:
            while True:
                self.calls.append((yield))
                self.notes.append(self.calls[-1].kernel)
        finally:
            self.notes.append("end")


@dataclass
class Module:
    """A generated module whose kernels and ops are shown to a watcher, as a trace would show them."""

    path: str
    watcher: KernelWatcher
    inside: Callable[[], object] = lambda: None
    functions: dict[str, Callable[..., Any]] = field(
        default_factory=lambda: {"cpp_fused_sin_0": sine, "cpp_fused_add_1": add}
    )

    def __call__(self, *inputs: Any) -> Any:
        text = Path(self.path).read_text(encoding="utf-8")
        functions: list[ast.stmt] = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
        values: dict[str, Any] = {
            "__file__": self.path,
            "recursively_apply_fns": None,
            "empty": torch.empty,
            "reinterpret_tensor": lambda tensor, *_: tensor,
            "extern_kernels": SimpleNamespace(mm=self.op(aten.mm.out)),
            "aten": SimpleNamespace(index_put_=self.op(aten.index_put_.default)),
            "torch": SimpleNamespace(
                ops=SimpleNamespace(
                    aten=SimpleNamespace(
                        sort=SimpleNamespace(stable=self.op(aten.sort.stable)),
                        mm=SimpleNamespace(default=self.op(aten.mm.default)),
                        rrelu_with_noise=SimpleNamespace(default=self.op(aten.rrelu_with_noise.default)),
                        unbind_copy=SimpleNamespace(int=self.op(aten.unbind_copy.int)),
                    )
                )
            ),
        }
        for name, function in self.functions.items():
            values[name] = self.kernel(KernelSite(self.path, name, TYPES[name], function))
        exec(compile(ast.Module(functions, []), self.path, "exec"), values)
        self.watcher.graph(self.path, inputs)
        try:
            return values["call"](list(inputs))
        finally:
            self.watcher.graph_ended()

    def op(self, func: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.shown(func, args, kwargs)

    def kernel(self, site: KernelSite) -> Callable[..., Any]:
        return lambda *args: self.shown(kernel_at(site, sys._getframe(1).f_lineno), args, {})

    def shown(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        node = f"{func}#{self.watcher.kernels}"
        self.watcher.before(node, func, args, kwargs)
        self.inside()
        output = func(*args, **kwargs)
        self.watcher.after(node, func, args, kwargs, output)
        return output


def module(folder: Path, body: str, *, known: bool = True) -> tuple[Module, Seen]:
    path = folder / "module.py"
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    path.write_text(f"{KERNELS}\ndef call(args):\n    arg0_1, = args\n{lines}\n", encoding="utf-8")
    seen = Seen()
    graph = CompiledGraph(str(path), torch.fx.GraphModule({}, torch.fx.Graph()), {})
    return Module(str(path), KernelWatcher({str(path): graph} if known else {}, seen)), seen


def words(call: KernelCall) -> str:
    """``in -> out``, by the names of buffers; ``*``: no later call writes it; ``?``: no name."""
    reads = " ".join(one.buffer or "?" for one in call.reads)
    writes = " ".join(f"{one.buffer or '?'}{'*' * (one.buffer in call.last)}" for one in call.writes)
    return f"{call.kernel}: {reads} -> {writes}"


X = torch.linspace(-1, 1, 9).reshape(3, 3)

SHOWN: dict[str, tuple[str, list[str]]] = {
    "kernels by position": (
        """
buf0 = empty(3, 3)
cpp_fused_sin_0(arg0_1, buf0, 9)
cpp_fused_add_1(buf0, arg0_1)
return (buf0, )
""",
        ["cpp_fused_sin_0: arg0_1 -> buf0", "cpp_fused_add_1: buf0 arg0_1 -> buf0*"],
    ),
    "memory that was taken over": (
        """
buf0 = empty(3, 3)
cpp_fused_sin_0(arg0_1, buf0, 9)
buf1 = buf0; del buf0  # reuse
cpp_fused_add_1(buf1, arg0_1)
return (buf1, )
""",
        ["cpp_fused_sin_0: arg0_1 -> buf0*", "cpp_fused_add_1: buf1 arg0_1 -> buf1*"],
    ),
    "what an op fills is not read": (
        """
buf0 = empty(3, 3)
extern_kernels.mm(arg0_1, arg0_1, out=buf0)
return (buf0, )
""",
        ["aten.mm.out: ? ? -> buf0*"],
    ),
    "what an op returns": (
        """
buf0 = torch.ops.aten.mm.default(arg0_1, arg0_1)
return (buf0, )
""",
        ["aten.mm.default: ? ? -> buf0*"],
    ),
    "what an op mutates": (
        """
buf0 = torch.ops.aten.mm.default(arg0_1, arg0_1)
aten.index_put_(buf0, [arg0_1 > 0], arg0_1[0, 0], True)
return (buf0, )
""",
        ["aten.mm.default: ? ? -> buf0", "aten.index_put_.default: ? ? ? -> buf0*"],
    ),
    "what an op returns beside what it mutates": (
        """
buf0 = torch.ops.aten.mm.default(arg0_1, arg0_1)
buf1 = torch.ops.aten.rrelu_with_noise.default(arg0_1, buf0, 0.1, 0.3, True)
return (buf1, buf0, )
""",
        ["aten.mm.default: ? ? -> buf0", "aten.rrelu_with_noise.default: ? ? -> buf1* buf0*"],
    ),
    "the elements of a tuple": (
        """
buf0 = torch.ops.aten.sort.stable(arg0_1, stable=True, dim=1, descending=False)
buf1 = buf0[0]
buf2 = buf0[1]
return (buf1, buf2, )
""",
        ["aten.sort.stable: ? -> buf1* buf2*"],
    ),
    "elements of which some have no name": (
        """
buf0 = torch.ops.aten.unbind_copy.int(arg0_1)
buf1 = buf0[0]
return (buf1, )
""",
        ["aten.unbind_copy.int: ? -> ? ? ?"],
    ),
    "a buffer that nothing uses": (
        """
buf0 = empty(3, 3)
buf1 = empty(3, 3)
cpp_fused_sin_0(arg0_1, buf0, 9)
cpp_fused_sin_0(arg0_1, buf1, 9)
return (buf1, )
""",
        ["cpp_fused_sin_0: arg0_1 -> buf0", "cpp_fused_sin_0: arg0_1 -> buf1*"],
    ),
}


@pytest.mark.parametrize("case", SHOWN)
def test_calls_are_shown_by_the_names_of_buffers(case: str, tmp_path: Path) -> None:
    body, expected = SHOWN[case]
    run, seen = module(tmp_path, body)
    run(X.clone())
    assert list(map(words, seen.calls)) == expected
    assert seen.notes[0] == "begin module.py 1"
    assert seen.notes[-1] == "end"
    assert (run.watcher.kernels, run.watcher.unseen) == (len(expected), 0)


BODY = SHOWN["kernels by position"][0]


class Autotuner:
    """A Triton kernel whose configuration is known once it has run."""

    launchers: Sequence[Any] = ()

    def run(self, x: torch.Tensor, out: torch.Tensor, _: int, *, stream: int) -> None:
        assert stream == 0
        torch.sin(x, out=out)
        chosen = SimpleNamespace(kwargs={"XBLOCK": 128}, num_warps=4, num_stages=1)
        self.launchers = [SimpleNamespace(config=chosen)]


def test_launches_of_a_triton_kernel_are_shown_with_their_configuration(tmp_path: Path) -> None:
    run, seen = module(tmp_path, BODY)
    text = Path(run.path).read_text(encoding="utf-8")
    _, _, after = text.partition("cpp_fused_add_1 = ")
    Path(run.path).write_text(
        f"""
cpp_fused_sin_0 = async_compile.triton('cpp_fused_sin_0', '''
@triton_heuristics.pointwise(triton_meta={{'signature': {{'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32'}}}})
@triton.jit
def cpp_fused_sin_0(in_ptr0, out_ptr0, xnumel):
    tl.store(out_ptr0, tl.load(in_ptr0))
''')
cpp_fused_add_1 = {after}""",
        encoding="utf-8",
    )
    run.functions["cpp_fused_sin_0"] = TritonLaunch(Autotuner())
    run(X.clone())
    assert [words(call) for call in seen.calls] == SHOWN["kernels by position"][1]
    assert [call.launch for call in seen.calls] == ["XBLOCK 128, 4 warps, 1 stage", ""]
    assert torch.equal(seen.calls[0].writes[0].tensor, X.sin() + X)  # what the second one left there


def test_content_is_that_before_and_after_the_call(tmp_path: Path) -> None:
    run, seen = module(tmp_path, BODY)
    (result,) = run(X.clone())
    sin, added = seen.calls
    assert added.reads[0].digest == sin.writes[0].digest != added.writes[0].digest
    assert added.reads[1].digest == sin.reads[0].digest
    assert added.writes[0].tensor is result
    assert (added.writes[0].address, added.writes[0].nbytes) == (result.data_ptr(), 36)
    assert (sin.generated, sin.node) == (True, "cpp_fused_sin_0#0")


def test_ops_inside_an_op_are_not_shown(tmp_path: Path) -> None:
    run, seen = module(tmp_path, BODY)

    def inside() -> None:
        run.watcher.before("inner", aten.neg.default, (X,), {})
        run.watcher.after("inner", aten.neg.default, (X,), {}, -X)

    run.inside = inside
    run(X.clone())
    assert seen.notes == ["begin module.py 1", "cpp_fused_sin_0", "cpp_fused_add_1", "end"]
    assert run.watcher.kernels == 2


def test_ops_outside_of_graphs_are_not_shown(tmp_path: Path) -> None:
    run, seen = module(tmp_path, BODY)
    run.shown(aten.neg.default, (X,), {})
    run(X.clone())
    run.shown(aten.neg.default, (X,), {})
    assert seen.notes == ["begin module.py 1", "cpp_fused_sin_0", "cpp_fused_add_1", "end"]


def test_a_graph_that_raised_does_not_hide_the_next(tmp_path: Path) -> None:
    run, seen = module(tmp_path, BODY)

    def fails() -> None:
        raise ValueError("inside the op")

    run.inside = fails
    with pytest.raises(ValueError, match="inside the op"):
        run(X.clone())
    run.inside = lambda: None
    run(X.clone())
    assert seen.notes[1:] == ["end", "begin module.py 1", "cpp_fused_sin_0", "cpp_fused_add_1", "end"]


def test_a_graph_that_is_not_known_is_counted(tmp_path: Path) -> None:
    run, seen = module(tmp_path, BODY, known=False)
    run(X.clone())
    assert (seen.notes, run.watcher.unseen, run.watcher.kernels) == ([], 1, 0)


def test_two_observers_are_shown_the_same(tmp_path: Path) -> None:
    first, second = Seen(), Seen()
    run, _ = module(tmp_path, BODY)
    graph = CompiledGraph(run.path, torch.fx.GraphModule({}, torch.fx.Graph()), {})
    run.watcher = KernelWatcher({run.path: graph}, first, second)
    run(X.clone())
    assert first.notes == second.notes == ["begin module.py 1", "cpp_fused_sin_0", "cpp_fused_add_1", "end"]
