"""Models of public shapes with random weights, and what a pass must read and multiply of them."""

import argparse
from dataclasses import replace
from typing import Any

import torch

from blockpilot.core.device import Placement
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.target import TargetRunner
from blockpilot.gpu.dflash import GpuDFlashDrafter
from blockpilot.gpu.target import GpuTargetRunner
from blockpilot.models.config import DecoderConfig, MoeConfig, RopeConfig
from blockpilot.models.decoder import Decoder, MoE
from blockpilot.models.dflash import DFlash, DFlashConfig

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"hidden": 576, "ffn": 1536, "layers": 30, "heads": 9, "kv": 3, "dim": 64, "vocab": 49152},
    "qwen3-4b": {"hidden": 2560, "ffn": 9728, "layers": 36, "heads": 32, "kv": 8, "dim": 128, "vocab": 151936},
    "qwen3-8b": {"hidden": 4096, "ffn": 12288, "layers": 36, "heads": 32, "kv": 8, "dim": 128, "vocab": 151936},
    "qwen3-coder-30b-a3b": {
        "hidden": 2048,
        "ffn": 6144,
        "layers": 48,
        "heads": 32,
        "kv": 4,
        "dim": 128,
        "vocab": 151936,
    },
    "llama-3.1-8b": {"hidden": 4096, "ffn": 14336, "layers": 32, "heads": 32, "kv": 8, "dim": 128, "vocab": 128256},
}
EXPERTS = {"qwen3-coder-30b-a3b": MoeConfig(num_experts=128, num_active=8, intermediate_size=768, is_normalized=True)}
LLAMAS = ("smollm2-135m", "llama-3.1-8b")
TIED = ("smollm2-135m", "qwen3-4b")
DRAFT_LAYERS = 5
DEVICE = torch.device("cuda")


def read_shapes(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """The names in a list; ends the program where one is unknown, or where there is no GPU."""
    names = text.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"unknown shape {unknown[0]}; known: {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here, and this measures one")
    return names


def make_config(name: str, num_layers: int | None = None) -> DecoderConfig:
    shape = SHAPES[name]
    return DecoderConfig(
        architecture="llama" if name in LLAMAS else "qwen3_moe" if name in EXPERTS else "qwen3",
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_layers=num_layers or shape["layers"],
        num_heads=shape["heads"],
        num_kv_heads=shape["kv"],
        head_dim=shape["dim"],
        norm_eps=1e-6,
        context_length=32768,
        rope=RopeConfig(theta=1e6),
        is_tied=name in TIED,
        moe=EXPERTS.get(name),
    )


def make_decoder(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    with torch.device(DEVICE):
        torch.set_default_dtype(dtype)
        decoder = Decoder(config)
        torch.set_default_dtype(torch.float32)
    return decoder.eval().requires_grad_(False)


def make_drafter(config: DecoderConfig, dtype: torch.dtype) -> DFlash:
    """Plain DFlash of the public shape: five layers as wide as the target's, five taps, the target's head."""
    taps = tuple(round(1 + index * (config.num_layers - 4) / 4) for index in range(5))
    draft = DFlashConfig(
        layers=replace(config, architecture="qwen3", num_layers=DRAFT_LAYERS, moe=None),
        block_size=16,
        mask_token_id=0,
        tap_layers=taps,
        num_target_layers=config.num_layers,
    )
    with torch.device(DEVICE):
        torch.set_default_dtype(dtype)
        model = DFlash(draft)
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def make_engine(
    decoder: Decoder, model: DFlash, batch: int, context: int, dtype: torch.dtype
) -> tuple[GpuTargetRunner, GpuDFlashDrafter]:
    placement = Placement(num_slots=batch, context_length=context + 256, device=DEVICE, dtype=dtype)
    runner = GpuTargetRunner(decoder, placement)
    drafter = GpuDFlashDrafter(model, placement, embed=decoder.embed_tokens, head=decoder.lm_head)
    runner.cache.rows.normal_()
    drafter.cache.rows.normal_()
    return runner, drafter


def weight_bytes(model: torch.nn.Module, *, with_embedding: bool = False) -> int:
    """Bytes that a pass reads: everything but the embedding, unless that is the head too."""
    return sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if with_embedding or not name.startswith("embed_tokens")
    )


def idle_bytes(runner: GpuTargetRunner, trees: list[tuple[int, DraftTree]]) -> int:
    """Weights of experts that no token of the check chooses."""
    routed = [module for module in runner.decoder.modules() if isinstance(module, MoE)]
    chosen: list[torch.Tensor] = []  # by layer
    hooks = [moe.gate.register_forward_hook(lambda *call: chosen.append(call[-1])) for moe in routed]
    if routed:
        TargetRunner.verify(runner, trees, ())  # unrecorded: hooks are called
    for hook in hooks:
        hook.remove()
    idle = 0
    for moe, logits in zip(routed, chosen, strict=True):
        num_idle = len(moe.experts) - len(logits.topk(moe.num_active).indices.unique())
        idle += weight_bytes(moe.experts) // len(moe.experts) * num_idle
    return idle


def flops(decoder: Decoder, num_tokens: int) -> int:
    """Of the products with weights; routed experts count with those that a token visits."""
    moe = decoder.config.moe
    total = 0
    for name, parameter in decoder.named_parameters():
        is_embedding = name.startswith("embed_tokens") and not decoder.config.is_tied
        share = moe.num_active / moe.num_experts if moe is not None and ".experts." in name else 1
        total += 0 if is_embedding else int(2 * parameter.numel() * share)
    return total * num_tokens
