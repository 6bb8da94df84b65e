"""A tiny Llama of transformers under its own debugger, and an engine's rewrite of it that dumps as engines do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, model_addition_debugger_context

HEADS, KV_HEADS, SIZE = 4, 2, 16
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    vocab_size=101,
    max_position_embeddings=64,
    attn_implementation="eager",
)
IDS = torch.randint(0, 101, (2, 11), generator=torch.Generator().manual_seed(3))

Named = tuple[str, torch.Tensor]


def llama() -> LlamaForCausalLM:
    """Return the model, with weights that are not near zero and norms that are not one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG).eval()
        for each in model.parameters():
            each.data = each.data + 0.1 * torch.randn_like(each) if each.dim() == 1 else each.data * 4
    return model


def debugged(folder: Path, dtype: torch.dtype = torch.float32, *, prune: bool = False, printed: bool = False) -> Path:
    """Run the model under transformers' debugger; return the folder."""
    model = llama().to(dtype)
    model.model.rotary_emb.inv_freq = llama().model.rotary_emb.inv_freq
    with (
        torch._tensor_str.printoptions(),  # the debugger changes them
        model_addition_debugger_context(model, str(folder), do_prune_layers=prune, use_repr=printed),
    ):
        model.forward(input_ids=IDS, use_cache=False)
    return folder


def engine(dtype: torch.dtype = torch.float32, fault: str = "", layer: int = 1) -> Iterator[Named]:
    """Yield what an engine computes, in order: tokens x width, fused qkv and gate_up, the residual beside."""
    weights = {name: tensor.to(dtype) for name, tensor in llama().state_dict().items()}
    theta = 10100.0 if fault == "theta" else 10000.0
    frequencies = torch.outer(torch.arange(11.0).repeat(2), 1 / theta ** (torch.arange(0, SIZE, 2) / SIZE))
    cos, sin = (made.to(dtype).unsqueeze(1) for made in (frequencies.cos(), frequencies.sin()))

    def norm(x: torch.Tensor, weight: torch.Tensor, *, hit: bool = False) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (1e-3 if hit and fault == "eps" else 1e-6))
        return (wide * ((hit and fault == "norm") + weight.float())).to(dtype)

    def rope(x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    hidden = functional.embedding(IDS.flatten(), weights["model.embed_tokens.weight"])
    yield "embed", hidden
    residual = torch.zeros_like(hidden)
    for number in range(3):
        hit = number == layer
        held = {name: weights[f"model.layers.{number}.{name}.weight"] for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}  # fmt: skip
        at = f"layers.{number}"
        residual = residual + hidden
        hidden = norm(residual, held["input_layernorm"], hit=hit)
        yield f"{at}.attn_norm", hidden
        qkv = hidden @ torch.cat([held[f"self_attn.{name}_proj"] for name in "qkv"]).t()
        if hit and fault == "stale":
            stale = weights[f"model.layers.{(number + 1) % 3}.self_attn.q_proj.weight"]
            qkv = torch.cat([hidden @ stale.t(), qkv[:, 64:]], -1)
        yield f"{at}.qkv", qkv
        q, k, v = (x.reshape(22, -1, SIZE) for x in qkv.split([64, 32, 32], -1))
        q, k = (q if hit and fault == "no rope" else rope(q)), rope(k)
        q, k, v = (x.reshape(2, 11, -1, SIZE).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat(1, 2, 1, 1) if hit and fault == "repeat" else x.repeat_interleave(2, 1) for x in (k, v))
        scale = (1.05 if hit and fault == "scale" else 1.0) / math.sqrt(SIZE)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=not (hit and fault == "mask"), scale=scale
        )
        attended = attended.transpose(1, 2).reshape(22, -1)
        yield f"{at}.attn", attended
        hidden = attended @ held["self_attn.o_proj"].t()
        yield f"{at}.o", hidden
        residual = residual + hidden
        hidden = norm(residual, held["post_attention_layernorm"])
        yield f"{at}.mlp_norm", hidden
        gate, up = (hidden @ held[f"mlp.{name}_proj"].t() for name in ("gate", "up"))
        yield f"{at}.gate_up", torch.cat([gate, up], -1)
        gate, up = (up, gate) if hit and fault == "swapped" else (gate, up)
        activated = (functional.gelu(gate) if hit and fault == "gelu" else functional.silu(gate)) * up
        yield f"{at}.act", activated
        hidden = activated @ held["mlp.down_proj"].t()
        if hit and fault == "down":
            hidden = activated[:, :48] @ held["mlp.down_proj"][:, :48].t()  # a shard is missing
        yield f"{at}.down", hidden
    last = norm(hidden if fault == "no residual" else residual + hidden, weights["model.norm.weight"])
    yield "norm", last
    yield "logits", last @ weights["lm_head.weight"].t()


FAULTS = {
    "theta": "layers.0.attn",
    "eps": "layers.1.attn_norm",
    "norm": "layers.1.attn_norm",
    "stale": "layers.1.qkv",
    "no rope": "layers.1.attn",
    "repeat": "layers.1.attn",
    "scale": "layers.1.attn",
    "mask": "layers.1.attn",
    "swapped": "layers.1.act",
    "gelu": "layers.1.act",
    "down": "layers.1.down",
    "no residual": "norm",
}
"""Fault -> the first tensor of the engine that it changes."""


def _save_npy(file: Path, tensor: torch.Tensor) -> None:
    np.save(file, tensor.contiguous().numpy())


SAVERS: dict[str, Callable[[Path, torch.Tensor], None]] = {
    ".npy": _save_npy,
    ".pt": lambda file, tensor: torch.save(tensor, file),
    ".safetensors": lambda file, tensor: safetensors.torch.save_file({"x": tensor.contiguous()}, file),
}


def saved(folder: Path, tensors: Iterator[Named], suffix: str = ".safetensors", *, numbered: bool = True) -> Path:
    """Write each tensor into a file of its own, with the number of the call in its name; return the folder."""
    folder.mkdir(parents=True)
    for number, (name, tensor) in enumerate(tensors):
        SAVERS[suffix](folder / f"{f'{number:04}_' if numbered else ''}{name}{suffix}", tensor)
    return folder
