"""AdamW for everything, or Muon for matrices; linear warm-up, then a cosine down to a fiftieth."""

import math
from collections.abc import Sequence

import torch
from torch import nn


def make_optimizers(
    model: nn.Module, *, kind: str, learning_rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """`kind` is adamw or muon; look-up tables are no matrices."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [p for name, p in named if kind == "muon" and p.dim() == 2 and "codebook" not in name]
    others = {id(parameter) for parameter in matrices}
    rest = [parameter for _, parameter in named if id(parameter) not in others]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay)
    ]
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def learning_rate_scale(step: int, num_steps: int, warmup_share: float) -> float:
    """What the learning rate of `step` is multiplied by."""
    warmup = max(1, int(warmup_share * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return 0.02 + 0.49 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
