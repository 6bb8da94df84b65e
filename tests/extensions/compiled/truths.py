"""What is true of the models of the suite ``compiled``: what was planted, and what a judge must and must not say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of one model of the suite.

    Attributes:
        name: of the model.
        mode: in which it is judged, ``training`` or ``inference``.
        accuracy: the status of its row, in the words of ``benchmarks/dynamo`` where it has one; several where
            rounding, and so the machine, decides.
        stage: of the compiler that is wrong, ``runtime`` where the compiled program runs wrongly; empty: none is.
        op: the aten op or operator of the user's program that is computed wrongly, or whose fault it is; empty: none.
        kernel: pattern of the name of the first generated or extern kernel that writes something wrong; empty where no
            kernel is wrong: its graph is.
        compiler_pass: the pass that is wrong, as ``GraphTransformObserver`` has it; empty: none is.
        phase: ``forward`` or ``backward``; empty: none is wrong.
        semantic: whether float64 shows it: a mistake, and not rounding.
        backend: the first backend of the ladder in float64 that is apart from eager; empty: none.
        cured_by: switches of the compiler, any of which makes the difference vanish; empty: none of them does.
        differs_by: what must change between two compilations for their bits to differ; empty: nothing makes them.
    """

    name: str
    mode: str = "inference"
    accuracy: tuple[str, ...] = ("pass",)
    stage: str = ""
    op: str = ""
    kernel: str = ""
    compiler_pass: str = ""
    phase: str = ""
    semantic: bool = False
    backend: str = ""
    cured_by: tuple[str, ...] = ()
    differs_by: str = ""

    @property
    def is_blamed(self) -> bool:
        """Whether anything is to blame."""
        return self.stage != ""


def wrong(name: str, stage: str, op: str, **others: Any) -> Truth:
    """Return the truth of a mistake that float64 shows and ``same()`` sees, of the forward and of Inductor unless
    ``others`` say otherwise."""
    facts = {"phase": "forward", "backend": "inductor", **others}
    return Truth(name, accuracy=("fail_accuracy",), stage=stage, op=op, semantic=True, **facts)


PLANTED = (
    wrong("gelu_lowering", "lowering", "aten.gelu.default", kernel=r"cpp_fused_gelu_\d+", cured_by=("fallback",)),
    wrong(
        "pooling_backward",
        "lowering",
        "aten.avg_pool2d_backward.default",
        kernel=r"cpp_fused_\w*avg_pool2d_backward\w*",
        mode="training",
        phase="backward",
        cured_by=("fallback",),
    ),
    wrong(
        "elu_decomposition",
        "decomposition",
        "aten.elu.default",
        backend="aot_eager_decomp_partition",
        cured_by=("decomposition", "fallback"),
    ),
    wrong(
        "product_pattern", "post_grad_passes", "aten.mul.Tensor", compiler_pass="pass_pattern_1", cured_by=("pass",)
    ),
    wrong(
        "constant_folding",
        "joint_graph_passes",
        "aten.mul.Tensor",
        compiler_pass="constant_fold_uniform_value",
        cured_by=("pass",),
    ),
    wrong(
        "mutation_moved",
        "post_grad_passes",
        "aten.copy_.default",
        compiler_pass="reinplace_inplaceable_ops",
        cured_by=("pass",),
    ),
    wrong(
        "vector_tail", "codegen", "aten.mul.Tensor", kernel=r"cpp_fused_mul_sigmoid_\d+", cured_by=("simdlen=1",)
    ),
    wrong("relu_injected", "codegen", "aten.relu.default", kernel=r"cpp_fused_relu_\d+", cured_by=("fallback",)),
    wrong(
        "nan_lost", "codegen", "aten.maximum.default", kernel=r"cpp_fused_\w*maximum\w*", cured_by=("fallback",)
    ),
    wrong(
        "index_wraps",
        "codegen",
        "aten.embedding.default",
        kernel=r"cpp_fused_embedding_tanh_\d+",
        cured_by=("fallback",),
    ),
    wrong(
        "live_buffer_reused",
        "memory_planning",
        "aten.sigmoid.default",
        kernel=r"cpp_fused_repeat_sigmoid_\d+",
        cured_by=("allow_buffer_reuse",),
    ),
    wrong(
        "early_update",
        "memory_planning",
        "aten.gelu.default",
        kernel=r"cpp_fused_gelu_\d+",
        cured_by=("inplace_buffers",),
    ),
    wrong("stale_constant", "dynamo", "", backend="eager"),
    wrong("undeclared_mutation", "aot_autograd", "compiled_zoo.clip.default", backend="aot_eager"),
    wrong(
        "dropout_offset",
        "aot_autograd",
        "compiled_zoo.keep.default",
        mode="training",
        phase="backward",
        backend="aot_eager",
    ),
    wrong("fake_strides_unchecked", "aot_autograd", "compiled_zoo.turn.default"),
    Truth(
        "fake_strides",
        accuracy=("fail_to_run",),
        stage="aot_autograd",
        op="compiled_zoo.turn.default",
        phase="forward",
    ),
    Truth(
        "atomic_add",
        accuracy=("compiled_two_runs_differ",),
        stage="runtime",
        op="aten.index_add.default",
        kernel=r"cpp_fused_index_add_\w+",
        phase="forward",
        cured_by=("one_thread",),
    ),
    Truth(
        "set_order",
        accuracy=("compilations_differ",),
        stage="post_grad_passes",
        op="aten.add.Tensor",
        kernel=r"cpp_fused_add_\w+",
        compiler_pass="remove_assert_ops",
        phase="forward",
        cured_by=("pass",),
        differs_by="hash_seed",
    ),
    Truth(
        "split_reduction",
        accuracy=("compilations_differ",),
        stage="codegen",
        op="aten.sum.default",
        kernel=r"cpp_fused_\w*sum\w*",
        phase="forward",
        cured_by=("one_thread",),
        differs_by="threads",
    ),
)  # fmt: skip
"""Those with a fault. ``live_buffer_reused`` names the kernel whose write is not what the readers expect: the one that
overwrote. The fakes of operators belong to ``aot_autograd``, which traces with them; that of ``fake_strides_unchecked``
shows with ``inductor`` first, whose kernels rely on strides."""

TWINS = tuple(Truth(f"{truth.name}_twin", truth.mode) for truth in PLANTED)
"""The same programs without their faults."""

ROUNDING = ("pass", "fail_accuracy")
DECOYS = (
    Truth("long_variance", "training"),
    Truth("zero_gradient", "training"),
    Truth("rounded", accuracy=ROUNDING),
    Truth("near_ties", accuracy=ROUNDING),
    Truth("bfloat16_kept_wide", accuracy=ROUNDING, cured_by=("emulate_precision_casts",)),
    Truth("eager_less_exact", accuracy=ROUNDING, cured_by=("emulate_precision_casts",)),
    Truth("own_random", "training"),
    Truth("checkpointed_dropout", "training"),
    Truth("unread_workspace"),
    Truth("kernel_names"),
)
"""Those with nothing to blame. ``own_random`` fails without ``fallback_random``. Of ``checkpointed_dropout`` dynamo's
backend ``eager`` is apart and the three others are not: the stage is where a ladder is apart *from there on*."""

TRUTHS = {truth.name: truth for truth in (*PLANTED, *TWINS, *DECOYS)}


# ---------------------------------------------------------------------------------------------------- Triton code


def wrong_triton(name: str, op: str, kernel: str, **others: Any) -> Truth:
    """Return the truth of a mistake in Triton code, which Torch's tolerance may accept."""
    pattern = rf"triton_{kernel}"
    facts = {"accuracy": ROUNDING, "stage": "codegen", "phase": "forward", "semantic": True, **others}
    return Truth(f"triton_{name}", op=op, kernel=pattern, **facts)


TRITON_PLANTED = (
    wrong_triton("gelu_constant", "aten.gelu.default", r"poi_fused_\w*gelu\w*"),
    wrong_triton("tanh", "aten.tanh.default", r"poi_fused_\w*tanh\w*"),
    wrong_triton("narrow_sigmoid", "aten.sigmoid.default", r"poi_fused_\w*sigmoid\w*"),
    wrong_triton("epsilon", "aten.native_layer_norm.default", r"per_fused_\w*layer_norm\w*"),
    wrong_triton("floor_division", "aten.div.Tensor_mode", r"poi_fused_\w*div\w*"),
    wrong_triton("signed_bytes", "aten._to_copy.default", r"poi_fused_\w*_to_copy\w*"),
    wrong_triton("nan_lost", "aten.maximum.default", r"poi_fused_\w*maximum\w*"),
    wrong_triton("store_mask", "aten.relu.default", r"poi_fused_\w*relu\w*"),
    wrong_triton("rsqrt", "aten.rsqrt.default", r"per_fused_\w*rsqrt\w*"),
    wrong_triton("masked_maximum", "aten.amax.default", r"per_fused_\w*amax\w*"),
    wrong_triton("sum_tail", "aten.sum.dim_IntList", r"red_fused_\w*sum\w*"),
    wrong_triton("welford_count", "aten.var.correction", r"red_fused_\w*var\w*"),
    wrong_triton("argmax_ties", "aten.argmax.default", r"per_fused_\w*argmax\w*"),
    wrong_triton("scan_carry", "aten.cumsum.default", r"red_fused_\w*cumsum\w*"),
    wrong_triton("softmax_overflow", "aten._softmax.default", r"per_fused_\w*softmax\w*"),
    wrong_triton("bias_gradient", "aten.sum.dim_IntList", r"per_fused_\w*sum\w*", mode="training", phase="backward"),
    wrong_triton("gather", "aten.embedding.default", r"poi_fused_\w*embedding\w*"),
    wrong_triton("atomic_store", "aten.index_add.default", r"poi_fused_\w*index_add\w*"),
    wrong_triton("transpose", "aten.add.Tensor", r"poi_fused_\w*add\w*"),
    wrong_triton("cat_border", "aten.cat.default", r"poi_fused_\w*cat\w*"),
)
"""Those with a fault in Triton code: ``--as cuda:90`` makes and interprets it without a GPU."""

TRITON_TWINS = tuple(Truth(f"{truth.name}_twin", truth.mode) for truth in TRITON_PLANTED)

TRITON_DECOYS = (
    Truth("triton_long_sums"),
    Truth("triton_bfloat16", accuracy=ROUNDING),
    Truth("triton_batch_statistics", "training"),
    Truth("triton_online_softmax"),
    Truth("triton_cancellation", accuracy=ROUNDING),
    Truth("triton_dropout", "training"),
    Truth("triton_near_ties", accuracy=ROUNDING),
    Truth("triton_updates"),
    Truth("triton_empty"),
    Truth("triton_integers"),
)

TRITON_TRUTHS = {truth.name: truth for truth in (*TRITON_PLANTED, *TRITON_TWINS, *TRITON_DECOYS)}
