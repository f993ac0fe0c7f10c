"""How linear layers run: weights are packed once at load, for the device and the precision that run them.

`pack_linears` swaps every `nn.Linear` of a loaded model for the fastest equivalent the machine offers; the model code
keeps calling `layer(x)` and does not know. On a CPU plain `F.linear` re-packs its weights at every call with more than
one row, which costs as much as the arithmetic itself; the packed form does that work once.

    int8     codes of 4 to 8 bits times activations rounded to 8 bits, on a CPU (`native/`)
    mkldnn   oneDNN weights in PyTorch's own packed layout (float32 on CPUs that have it)
    plain    torch.nn.Linear: GPUs, other dtypes, CPUs without a fast path
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockpilot.core.errors import InputError
from blockpilot.models.block_codes import BLOCK, BlockCodes
from blockpilot.models.config import DecoderConfig
from blockpilot.native.library import MAX_DIM, MAX_LAYERS, Kernels, open_kernels
from blockpilot.native.weights import PackedWeight, pack_weight

REVISION = 14  # of how steps run and are timed: raise it when that changes, and step costs are measured anew
BACKENDS = ("auto", "mkldnn", "plain")


class MkldnnLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Int8Linear(nn.Module):
    """A linear layer in codes. Its input is rounded to 8 bits per block of 32; sums are float32, a bias comes last."""

    def __init__(self, parts: Sequence[BlockCodes], kernels: Kernels, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.in_features = parts[0].codes.shape[1]
        self.out_features = sum(len(part.codes) for part in parts)
        self.kernels = kernels
        self.parts = [pack_weight(kernels, part.codes, part.scales, part.offsets, part.fine) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        found = [self._multiply(part, rows) for part in self.parts]
        out = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        return (out if self.bias is None else out + self.bias).unflatten(0, x.shape[:-1])

    def _multiply(self, part: PackedWeight, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), part.info.rows)
        if len(rows):
            self.kernels.multiply(part.info, rows.data_ptr(), out.data_ptr(), len(rows))
        return out


def machine_kernels() -> Kernels | None:
    return open_kernels(torch.get_num_threads())


def require_kernels() -> Kernels:
    kernels = machine_kernels()
    if kernels is None:
        raise InputError("dtype int8 needs the compiled CPU kernels, and there are none here: use --dtype float32")
    return kernels


def why_unpackable(config: DecoderConfig) -> str | None:
    """Why a model of these shapes cannot run in 8-bit integers. None: it can."""
    moe = config.moe
    sizes = [("hidden size", config.hidden_size), ("width of attention", config.num_heads * config.head_dim)]
    if moe is not None:
        sizes.append(("intermediate size of experts", moe.intermediate_size))
    if moe is None or moe.dense_layers:
        sizes.append(("intermediate size", config.intermediate_size))
    for name, size in sizes:
        if size % BLOCK:
            return f"its {name} {size} is no multiple of {BLOCK}"
    if config.head_dim % 16 or config.head_dim > MAX_DIM:
        return f"its heads have {config.head_dim} numbers, and only multiples of 16 up to {MAX_DIM} are supported"
    return f"it has more than {MAX_LAYERS} layers" if config.num_layers > MAX_LAYERS else None


def require_packable(config: DecoderConfig, name: str) -> None:
    if (reason := why_unpackable(config)) is not None:
        raise InputError(f"{name} cannot run in dtype int8: {reason}; use --dtype float32")


def choose_backend(requested: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that will run: what was asked for where this machine has it, else the best there is."""
    if requested not in BACKENDS:
        raise InputError(f"unknown linear backend {requested!r}; known: {', '.join(BACKENDS)}")
    if dtype == torch.int8:
        return "int8"
    if device.type != "cpu" or dtype != torch.float32 or requested == "plain":
        return "plain"
    return "mkldnn" if torch.backends.mkldnn.is_available() else "plain"


def pack_linear(layer: nn.Linear, backend: str) -> nn.Module:
    """The same layer in packed form; its float weight is given up unless something else (an embedding) holds it."""
    if backend == "plain":
        return layer
    if backend == "int8":
        parts = getattr(layer, "block_codes", None)
        return layer if parts is None else Int8Linear(parts, require_kernels(), layer.bias)  # routers have no codes
    return MkldnnLinear(layer.weight, layer.bias) if torch.backends.mkldnn.is_available() else layer


def pack_linears(model: nn.Module, backend: str) -> None:
    """Replace every nn.Linear inside `model`.

    A model that has been packed stays as it is, so that two engines may share it.
    """
    if backend == "plain" or getattr(model, "is_packed", False):
        return
    model.is_packed = True  # type: ignore[assignment]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, pack_linear(child, backend))


def quantize_linears(model: nn.Module) -> None:
    """Round every linear layer that fits to 8-bit codes: for drafters, whose output is checked anyway.

    Weights that were stored as codes (`models/tensor_files.py`) get exactly those codes back.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.in_features % BLOCK == 0 and not hasattr(module, "block_codes"):
            module.block_codes = (BlockCodes.quantize(module.weight.detach().numpy()),)  # type: ignore[assignment]


def rows_of(layer: nn.Module, ids: Tensor) -> nn.Linear:
    """Some rows of a linear layer that has not been packed, as a layer of its own."""
    assert isinstance(layer, nn.Linear)
    found = nn.Linear(layer.in_features, len(ids), bias=False, device="meta")
    if (parts := getattr(layer, "block_codes", None)) is not None:
        found.block_codes = tuple(part.rows(ids.cpu().numpy()) for part in parts)  # type: ignore[assignment]
    if not layer.weight.is_meta:
        found.weight = nn.Parameter(layer.weight[ids.to(layer.weight.device)], requires_grad=False)
    return found
