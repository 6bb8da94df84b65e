"""The ViT of torchvision and that of timm, both unchanged; faults are in what (b) is built from."""

from functools import partial

import torch
from _pairs import drawn, randomised
from timm.models.vision_transformer import VisionTransformer as Timm
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

NAMES = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attn.proj": "self_attention.out_proj",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.3",
}


def make_a():
    return randomised(VisionTransformer(32, 8, 2, 4, 48, 96, num_classes=10), 11)


def converted(state):
    """Return weights of torchvision under timm's names."""
    new = {"cls_token": state["class_token"], "pos_embed": state["encoder.pos_embedding"]}
    for part in ("weight", "bias"):
        new[f"patch_embed.proj.{part}"] = state[f"conv_proj.{part}"]
        new[f"norm.{part}"], new[f"head.{part}"] = state[f"encoder.ln.{part}"], state[f"heads.head.{part}"]
        for number in range(2):
            old = f"encoder.layers.encoder_layer_{number}."
            new[f"blocks.{number}.attn.qkv.{part}"] = state[f"{old}self_attention.in_proj_{part}"]
            for ours, theirs in NAMES.items():
                new[f"blocks.{number}.{ours}.{part}"] = state[f"{old}{theirs}.{part}"]
    return new


def make_b(fault=""):
    act = partial(nn.GELU, approximate="tanh") if fault == "gelu_tanh" else nn.GELU
    options = {"class_token": True, "global_pool": "avg" if fault == "mean_pooled" else "token", "fc_norm": False}
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2}
    model = Timm(**sizes, num_classes=10, act_layer=act, **options)
    state = converted(make_a().state_dict())
    qkv = state["blocks.1.attn.qkv.weight"]
    match fault:
        case "positions_shifted":
            state["pos_embed"] = state["pos_embed"].roll(1, 1)
        case "stale":
            state["blocks.1.mlp.fc1.weight"] = state["blocks.1.mlp.fc1.weight"] * 1.001
        case "qkv_interleaved":
            state["blocks.1.attn.qkv.weight"] = qkv.unflatten(0, (3, 4, 12)).transpose(0, 1).reshape(144, 48)
        case "kv_exchanged":
            state["blocks.1.attn.qkv.weight"] = torch.cat([qkv[:48], qkv[96:], qkv[48:96]])
        case "bias_missing":
            state["blocks.0.attn.proj.bias"] = torch.zeros(48)
        case "patch_transposed":
            state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].mT.contiguous()
        case "channels_reversed":
            state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flip(1)
    model.load_state_dict(state)
    if fault != "eps":
        for layer in model.modules():
            if isinstance(layer, nn.LayerNorm):
                layer.eps = 1e-6
    else:
        model.blocks[1].norm2.eps = 1e-5
    if fault == "scale":
        model.blocks[0].attn.scale *= 1.001
        model.blocks[0].attn.fused_attn = False
    if fault == "formula":
        for block in model.blocks:
            block.attn.fused_attn = False
    return model.eval()


def inputs():
    return (drawn(12, 3, 3, 32, 32),)
