"""One small decoder, as twenty other programs hold its weights; and thirty ways in which a loader gets them wrong.

The expected answers were written before any of them was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

State = dict[str, torch.Tensor]

LAYERS, WIDTH, KV, INNER, VOCABULARY, EXPERTS, HEADS = 3, 64, 32, 96, 50, 4, 4


def decoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> State:
    """The decoder as its authors hold it: one tensor for each projection, all with values of their own."""
    torch.manual_seed(seed)
    state = {"model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH)}
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        for name, rows in (("q", WIDTH), ("k", KV), ("v", KV)):
            state[f"{at}.self_attn.{name}_proj.weight"] = torch.randn(rows, WIDTH)
            state[f"{at}.self_attn.{name}_proj.bias"] = torch.randn(rows)
        state[f"{at}.self_attn.o_proj.weight"] = torch.randn(WIDTH, WIDTH)
        state[f"{at}.mlp.gate_proj.weight"] = torch.randn(INNER, WIDTH)
        state[f"{at}.mlp.up_proj.weight"] = torch.randn(INNER, WIDTH)
        state[f"{at}.mlp.down_proj.weight"] = torch.randn(WIDTH, INNER)
        state[f"{at}.input_layernorm.weight"] = torch.ones(WIDTH)
        state[f"{at}.post_attention_layernorm.weight"] = 1 + torch.randn(WIDTH) / 8
        for e in range(EXPERTS):
            for name, shape in (("w1", (INNER, WIDTH)), ("w2", (WIDTH, INNER)), ("w3", (INNER, WIDTH))):
                state[f"{at}.moe.experts.{e}.{name}.weight"] = torch.randn(shape)
    state["model.norm.weight"] = torch.ones(WIDTH)
    state["lm_head.weight"] = torch.randn(VOCABULARY, WIDTH)
    state["conv.weight"] = torch.randn(16, 8, 3, 3)
    state["logit_scale"] = torch.tensor(2.5)
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def _renamed(state: State) -> State:
    """Names of an engine, none of which the authors use."""
    words = {"model.": "", "embed_tokens": "tok", "self_attn": "attn", "layers": "blocks", "lm_head": "output"}
    words |= {"input_layernorm": "n1", "post_attention_layernorm": "n2", "_proj": "", "conv": "stem", "logit": "temp"}
    words |= {"model.norm": "final", "w1": "gate", "w2": "down", "w3": "up"}
    made = {}
    for name, tensor in state.items():
        for old, new in words.items():
            name = name.replace(old, new)
        made[name] = tensor.clone()
    return made


def _fused(state: State, *, interleave: bool = False, turn: bool = False) -> State:
    """``qkv`` and ``gate_up``, with their biases."""
    made = _renamed(state)
    for n in range(LAYERS):
        at = f"blocks.{n}"
        q, k, v = (made.pop(f"{at}.attn.{name}.weight") for name in "qkv")
        biases = [made.pop(f"{at}.attn.{name}.bias") for name in "qkv"]
        parts = [q, k, v]
        if interleave:  # head by head: some rows of q, then of k, then of v
            parts = [part for each in zip(*(part.chunk(HEADS) for part in parts), strict=True) for part in each]
            biases = [part for each in zip(*(part.chunk(HEADS) for part in biases), strict=True) for part in each]
        whole = torch.cat(parts)
        made[f"{at}.attn.qkv.weight"] = whole.t().contiguous() if turn else whole
        made[f"{at}.attn.qkv.bias"] = torch.cat(biases)
        gate_up = torch.cat([made.pop(f"{at}.mlp.gate.weight"), made.pop(f"{at}.mlp.up.weight")])
        made[f"{at}.mlp.gate_up.weight"] = gate_up.t().contiguous() if turn else gate_up
    return made


def _stacked(state: State, *, turn: bool = False) -> State:
    """Experts in one tensor each for the first and second layer of all of them."""
    made = _fused(state)
    for n in range(LAYERS):
        at = f"blocks.{n}.moe.experts"
        experts = [
            {name: made.pop(f"{at}.{e}.{name}.weight") for name in ("gate", "up", "down")} for e in range(EXPERTS)
        ]
        gate_up = torch.stack([torch.cat([each["gate"], each["up"]]) for each in experts])
        down = torch.stack([each["down"] for each in experts])
        made[f"{at}.gate_up"] = gate_up.transpose(1, 2).contiguous() if turn else gate_up
        made[f"{at}.down"] = down.transpose(1, 2).contiguous() if turn else down
    return made


def _turned(state: State) -> State:
    """All matrices as inputs x outputs, as ``Conv1D`` of GPT-2 has them."""
    return {name: each.t().contiguous() if each.dim() == 2 else each for name, each in _renamed(state).items()}


def _rotary(state: State) -> State:
    """Rows of q and k in the order of another rotary embedding."""
    made = _renamed(state)
    for n in range(LAYERS):
        for name, rows in (("q", WIDTH), ("k", KV)):
            at = f"blocks.{n}.attn.{name}"
            size = WIDTH // HEADS
            for kind in ("weight", "bias"):
                each = made[f"{at}.{kind}"]
                tail = each.shape[1:]
                made[f"{at}.{kind}"] = (
                    each.view(rows // size, size // 2, 2, *tail).transpose(1, 2).reshape(rows, *tail).contiguous()
                )
    return made


def _sharded(state: State, ranks: int = 2) -> State:
    """Tensor parallel: rows of most matrices, columns of those behind them."""
    made = {}
    for name, tensor in _fused(state).items():
        if tensor.dim() != 2 or name in ("tok.weight", "output.weight"):
            made[f"rank0.{name}"] = tensor
            continue
        if "qkv" in name:
            parts = [each.chunk(ranks) for each in tensor.split([WIDTH, KV, KV])]
            shards = [torch.cat(each) for each in zip(*parts, strict=True)]
        else:
            shards = [*tensor.chunk(ranks, dim=1 if ".o." in name or ".down." in name else 0)]
        made |= {f"rank{rank}.{name}": shard.clone() for rank, shard in enumerate(shards)}
    return made


def _padded(state: State, by: int = 14) -> State:
    """A vocabulary that is a multiple of 64."""
    made = _renamed(state)
    for name in ("tok.weight", "output.weight"):
        made[name] = torch.cat([made[name], torch.zeros(by, WIDTH, dtype=made[name].dtype)])
    return made


def _tied(state: State) -> State:
    """The output layer, where the authors' is the embedding."""
    made = _fused(state)
    made["output.weight"] = made["tok.weight"]
    return made


def _cast(dtype: torch.dtype, layout: Callable[[State], State]) -> Callable[[State], State]:
    return lambda state: {name: tensor.to(dtype) for name, tensor in layout(state).items()}


def _flat(state: State) -> State:
    """All that a layer holds in one vector, as sharded training flattens it."""
    made = {name: each for name, each in _renamed(state).items() if not name.startswith("blocks.")}
    for n in range(LAYERS):
        inside = [each.flatten() for name, each in _renamed(state).items() if name.startswith(f"blocks.{n}.")]
        made[f"flat.{n}"] = torch.cat(inside)
    return made


def _unbiased_keys(state: State) -> State:
    """Fused biases of which one part is zero, and absent on the other side."""
    return _fused({**state, **{f"model.layers.{n}.self_attn.k_proj.bias": torch.zeros(KV) for n in range(LAYERS)}})


def _scanned(state: State) -> State:
    """Every layer stacked in one tensor, as a compiled loop over layers wants them."""
    made: dict[str, list[torch.Tensor]] = {}
    for name, tensor in _renamed(state).items():
        made.setdefault(".".join(part for part in name.split(".") if not part.isdecimal()), []).append(tensor)
    return {name: torch.stack(each) if len(each) > 1 else each[0] for name, each in made.items()}


def _convolution(state: State) -> State:
    """A 1x1 convolution for each matrix."""
    return {name: each[..., None, None].clone() if each.dim() == 2 else each for name, each in _renamed(state).items()}


def _without(names: str) -> Callable[[State], State]:
    return lambda state: {name: each for name, each in state.items() if names not in name}


@dataclass(frozen=True)
class Layout:
    """How another program holds the weights; ``original`` changes what the authors hold."""

    make: Callable[[State], State]
    original: Callable[[State], State] = dict


LAYOUTS: Mapping[str, Layout] = {
    "the same names": Layout(dict),
    "everything renamed": Layout(_renamed),
    "qkv and gate_up fused": Layout(_fused),
    "fused, interleaved by head": Layout(lambda state: _fused(state, interleave=True)),
    "fused and transposed": Layout(lambda state: _fused(state, turn=True)),
    "experts stacked": Layout(_stacked),
    "experts stacked and transposed": Layout(lambda state: _stacked(state, turn=True)),
    "every matrix transposed": Layout(_turned),
    "rows in the order of another rotary embedding": Layout(_rotary),
    "cast to bfloat16": Layout(_cast(torch.bfloat16, _renamed)),
    "cast to float16": Layout(_cast(torch.float16, _renamed)),
    "fused, stacked and cast to bfloat16": Layout(_cast(torch.bfloat16, _stacked)),
    "bfloat16 kept as float32": Layout(
        _cast(torch.float32, _fused), lambda state: {name: each.bfloat16() for name, each in state.items()}
    ),
    "cut over two ranks": Layout(_sharded),
    "a padded vocabulary": Layout(_padded),
    "a padded vocabulary, cast": Layout(_cast(torch.bfloat16, _padded)),
    "the head is the embedding": Layout(_tied, _without("lm_head")),
    "every layer in one vector": Layout(_flat),
    "a bias of zeros inside a fused one": Layout(_unbiased_keys, _without("k_proj.bias")),
    "1x1 convolutions": Layout(_convolution),
    "every layer in one stack": Layout(_scanned),
}
"""What it is in words -> the layout: all hold the same weights."""


# ------------------------------------------------------------------------------------------------------ mistakes


@dataclass(frozen=True)
class Planted:
    """A mistake in a layout.

    Attributes:
        layout: of the side ``b``.
        spoil: changes that side.
        kind: the kind of difference that is expected first.
        names: names that the first difference must have, of either side.
        differing: elements that it must count, if any.
        more: further differences that are true as well.
    """

    layout: str
    spoil: Callable[[State], object]
    kind: str
    names: tuple[str, ...]
    differing: int | None = None
    more: int = 0


def _add(name: str, *at: int, by: float = 0.5) -> Callable[[State], object]:
    def spoil(state: State) -> None:
        state[name] = state[name].clone()
        state[name][at] += by

    return spoil


def _scale(name: str, factor: float = 1.01, rows: slice = slice(None)) -> Callable[[State], object]:
    def spoil(state: State) -> None:
        state[name] = state[name].clone()
        state[name][rows] *= factor

    return spoil


def _swap(one: str, other: str) -> Callable[[State], object]:
    def spoil(state: State) -> None:
        state[one], state[other] = state[other].clone(), state[one].clone()

    return spoil


def _copy(source: str, target: str) -> Callable[[State], object]:
    return lambda state: state.update({target: state[source].clone()})


def _drop(name: str) -> Callable[[State], object]:
    return lambda state: state.pop(name)


def _through(name: str, dtype: torch.dtype = torch.bfloat16) -> Callable[[State], object]:
    return lambda state: state.update({name: state[name].to(dtype).to(state[name].dtype)})


def _ordered(name: str, sizes: list[int], order: list[int], dim: int = 0) -> Callable[[State], object]:
    def spoil(state: State) -> None:
        parts = state[name].split(sizes, dim)
        state[name] = torch.cat([parts[each] for each in order], dim)

    return spoil


def _turn(name: str) -> Callable[[State], object]:
    return lambda state: state.update({name: state[name].t().contiguous()})


_QKV = [WIDTH, KV, KV]
_SELF = "model.layers.1.self_attn"
_MLP = "model.layers.1.mlp"

PLANTED: Mapping[str, Planted] = {
    "one element": Planted("the same names", _add("lm_head.weight", 3, 5), "changed", ("lm_head.weight",), 1),
    "one element of a bias": Planted(
        "everything renamed", _add("blocks.1.attn.q.bias", 7), "changed", ("blocks.1.attn.q.bias",), 1
    ),
    "one element of a renamed matrix": Planted(
        "everything renamed", _add("blocks.2.mlp.down.weight", 3, 5), "changed", ("blocks.2.mlp.down.weight",), 1
    ),
    "one element of a transposed matrix": Planted(
        "every matrix transposed", _add("blocks.2.mlp.down.weight", 3, 5), "changed", ("blocks.2.mlp.down.weight",), 1
    ),
    "one element of a fused matrix": Planted(
        "qkv and gate_up fused",
        _add("blocks.1.attn.qkv.weight", WIDTH + 2, 5),
        "changed",
        ("blocks.1.attn.qkv.weight", f"{_SELF}.k_proj.weight"),
        1,
    ),
    "one element of a fused, interleaved matrix": Planted(
        "fused, interleaved by head",
        _add("blocks.1.attn.qkv.weight", 2, 5),
        "changed",
        ("blocks.1.attn.qkv.weight", f"{_SELF}.q_proj.weight"),
        1,
    ),
    "one element of a fused bias": Planted(
        "qkv and gate_up fused",
        _add("blocks.1.attn.qkv.bias", WIDTH + 2),
        "changed",
        ("blocks.1.attn.qkv.bias", f"{_SELF}.k_proj.bias"),
        1,
    ),
    "one element of a stacked expert": Planted(
        "experts stacked",
        _add("blocks.1.moe.experts.down", 2, 3, 4),
        "changed",
        ("blocks.1.moe.experts.down", "model.layers.1.moe.experts.2.w2.weight"),
        1,
    ),
    "one element of a shard": Planted(
        "cut over two ranks",
        _add("rank1.blocks.0.mlp.down.weight", 3, 4),
        "changed",
        ("rank1.blocks.0.mlp.down.weight", "model.layers.0.mlp.down_proj.weight"),
        1,
    ),
    "one element after a cast": Planted(
        "cast to bfloat16", _add("blocks.1.attn.o.weight", 3, 4), "changed", ("blocks.1.attn.o.weight",), 1
    ),
    "one element of a convolution": Planted(
        "everything renamed", _add("stem.weight", 3, 4, 1, 1), "changed", ("stem.weight",), 1
    ),
    "one element of a padded embedding": Planted(
        "a padded vocabulary", _add("tok.weight", 3, 4), "changed", ("tok.weight", "model.embed_tokens.weight"), 1
    ),
    "one element of one vector": Planted(
        "every layer in one vector", _add("flat.1", 70), "changed", ("flat.1", f"{_SELF}.q_proj.weight"), 1
    ),
    "a row of zeros": Planted(
        "the same names", _scale("lm_head.weight", 0.0, slice(4, 5)), "changed", ("lm_head.weight",), WIDTH
    ),
    "a stale matrix": Planted(
        "everything renamed",
        _scale("blocks.2.mlp.down.weight"),
        "changed",
        ("blocks.2.mlp.down.weight", "model.layers.2.mlp.down_proj.weight"),
        WIDTH * INNER,
    ),
    "a stale norm": Planted(
        "everything renamed",
        _scale("blocks.2.n2.weight"),
        "changed",
        ("blocks.2.n2.weight", "model.layers.2.post_attention_layernorm.weight"),
        WIDTH,
    ),
    "a stale part of a fused matrix": Planted(
        "qkv and gate_up fused",
        _scale("blocks.1.attn.qkv.weight", 1.01, slice(WIDTH, WIDTH + KV)),
        "changed",
        ("blocks.1.attn.qkv.weight", f"{_SELF}.k_proj.weight"),
        KV * WIDTH,
    ),
    "a stale fused matrix": Planted(
        "qkv and gate_up fused",
        _scale("blocks.1.mlp.gate_up.weight"),
        "changed",
        ("blocks.1.mlp.gate_up.weight", f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    ),
    "a stale scalar": Planted(
        "the same names", lambda state: state.update(logit_scale=torch.tensor(2.75)), "changed", ("logit_scale",), 1
    ),
    "the matrix of another layer": Planted(
        "everything renamed",
        _copy("blocks.1.mlp.down.weight", "blocks.2.mlp.down.weight"),
        "copy",
        ("blocks.2.mlp.down.weight", "model.layers.2.mlp.down_proj.weight"),
    ),
    "two layers exchanged": Planted(
        "everything renamed",
        _swap("blocks.1.mlp.down.weight", "blocks.2.mlp.down.weight"),
        "exchanged",
        ("blocks.1.mlp.down.weight", "blocks.2.mlp.down.weight"),
    ),
    "k and v exchanged": Planted(
        "the same names",
        _swap(f"{_SELF}.k_proj.weight", f"{_SELF}.v_proj.weight"),
        "exchanged",
        (f"{_SELF}.k_proj.weight", f"{_SELF}.v_proj.weight"),
    ),
    "k and v exchanged inside a fused matrix": Planted(
        "qkv and gate_up fused",
        _ordered("blocks.1.attn.qkv.weight", _QKV, [0, 2, 1]),
        "order",
        ("blocks.1.attn.qkv.weight", f"{_SELF}.k_proj.weight", f"{_SELF}.v_proj.weight"),
    ),
    "gate and up exchanged inside a fused, transposed matrix": Planted(
        "fused and transposed",
        _ordered("blocks.1.mlp.gate_up.weight", [INNER, INNER], [1, 0], dim=1),
        "order",
        ("blocks.1.mlp.gate_up.weight", f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
    ),
    "two experts exchanged": Planted(
        "experts stacked",
        _ordered("blocks.1.moe.experts.down", [1] * EXPERTS, [0, 2, 1, 3]),
        "order",
        (
            "blocks.1.moe.experts.down",
            "model.layers.1.moe.experts.1.w2.weight",
            "model.layers.1.moe.experts.2.w2.weight",
        ),
    ),
    "two layers of a fused matrix exchanged": Planted(
        "qkv and gate_up fused",
        _swap("blocks.1.mlp.gate_up.weight", "blocks.2.mlp.gate_up.weight"),
        "exchanged",
        ("blocks.1.mlp.gate_up.weight", "blocks.2.mlp.gate_up.weight", f"{_MLP}.gate_proj.weight"),
    ),
    "a stale stack of layers": Planted(
        "every layer in one stack",
        _scale("blocks.mlp.down.weight"),
        "changed",
        ("blocks.mlp.down.weight", f"{_MLP}.down_proj.weight"),
    ),
    "a stale vector of a layer": Planted(
        "every layer in one vector", _scale("flat.1"), "changed", ("flat.1", f"{_MLP}.down_proj.weight")
    ),
    "a matrix is missing": Planted(
        "everything renamed", _drop("blocks.1.attn.o.weight"), "missing", (f"{_SELF}.o_proj.weight",)
    ),
    "a shard is missing": Planted(
        "cut over two ranks",
        _drop("rank1.blocks.1.mlp.down.weight"),
        "lines",
        (f"{_MLP}.down_proj.weight",),
    ),
    "rounded through bfloat16": Planted(
        "everything renamed", _through("blocks.1.attn.o.weight"), "narrowed", ("blocks.1.attn.o.weight",)
    ),
    "a part rounded through bfloat16": Planted(
        "qkv and gate_up fused",
        lambda state: state["blocks.1.attn.qkv.weight"][WIDTH : WIDTH + KV].copy_(
            state["blocks.1.attn.qkv.weight"][WIDTH : WIDTH + KV].bfloat16()
        ),
        "narrowed",
        ("blocks.1.attn.qkv.weight", f"{_SELF}.k_proj.weight"),
    ),
    "not transposed, as its siblings are": Planted(
        "every matrix transposed", _turn("blocks.1.attn.o.weight"), "layout", ("blocks.1.attn.o.weight",)
    ),
}
"""What went wrong in words -> the mistake."""
