"""How linear layers run: weights are packed once at load, for the device that runs them.

`pack_linears` swaps every `nn.Linear` of a loaded model for the fastest equivalent the machine offers; the model code
keeps calling `layer(x)` and does not know. On a CPU plain `F.linear` re-packs its weights at every call with more than
one row, which costs as much as the arithmetic itself; the packed form does that work once.

    blocks   quantized checkpoints on a CPU: float32 arithmetic straight from the stored codes (needs Numba)
    mkldnn   oneDNN weights in PyTorch's own packed layout (float32 on CPUs that have it)
    plain    torch.nn.Linear: GPUs, other dtypes, CPUs without a fast path
"""

import importlib.util

import torch
from torch import Tensor, nn

from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import BLOCK, BlockCodes, BlockLinear, BlockNorm, compile_kernels

REVISION = 13  # of how steps run and are timed: raise it when that changes, and step costs are measured anew
BACKENDS = ("auto", "blocks", "mkldnn", "plain")


class MkldnnLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that will run: what was asked for where this machine has it, else the best there is."""
    if requested not in BACKENDS:
        raise InputError(f"unknown linear backend {requested!r}; known: {', '.join(BACKENDS)}")
    if device.type != "cpu" or dtype != torch.float32 or requested == "plain":
        return "plain"
    if requested != "mkldnn" and importlib.util.find_spec("numba") is not None:
        return "blocks"
    return "mkldnn" if torch.backends.mkldnn.is_available() else "plain"


def pack_linear(layer: nn.Linear, backend: str) -> nn.Module:
    """The same layer in packed form; its float weight is given up unless something else (an embedding) holds it."""
    if backend == "plain":
        return layer
    many = MkldnnLinear(layer.weight) if torch.backends.mkldnn.is_available() else layer
    codes = getattr(layer, "block_codes", None)
    if backend == "blocks" and isinstance(codes, BlockCodes):
        return BlockLinear(codes, many, torch.get_num_threads())
    return many


def pack_linears(model: nn.Module, backend: str) -> None:
    """Replace every nn.Linear inside `model`, and the norms around them where a compiled one is at hand.

    A model that has been packed stays as it is, so that two engines may share it.
    """
    if backend == "plain" or getattr(model, "is_packed", False):
        return
    model.is_packed = True  # type: ignore[assignment]
    if backend == "blocks":
        compile_kernels(torch.get_num_threads())
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, pack_linear(child, backend))
            elif isinstance(child, nn.RMSNorm) and backend == "blocks":
                setattr(module, name, BlockNorm(child))


def quantize_linears(model: nn.Module) -> None:
    """Round every linear layer that fits to 8-bit codes: for drafters, whose output is checked anyway.

    Weights that were stored as codes (`models/tensor_files.py`) get exactly those codes back.

    The float weight becomes what the codes stand for, so that few tokens and many are multiplied by the same numbers:
    what is drafted must not depend on the batch.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.in_features % BLOCK == 0 and not hasattr(module, "block_codes"):
            codes = BlockCodes.quantize(module.weight.detach().numpy())
            module.block_codes = codes  # type: ignore[assignment]
            module.weight = nn.Parameter(torch.from_numpy(codes.dequantize()), requires_grad=False)
