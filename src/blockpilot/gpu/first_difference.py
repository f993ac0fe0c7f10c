"""Where two passes part: the first operation that gives a token other bits than its plain pass does.

Both run kernel by kernel, outside of any recording, with kernels that take a fingerprint of what every token gets.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from blockpilot.decoding.probe_passes import Difference, Pass, bits, path_to, read_token
from blockpilot.decoding.target import TargetRunner
from blockpilot.gpu.buckets import PROMPT_TOKENS, round_up
from blockpilot.gpu.interface import Kernels, Parts
from blockpilot.gpu.target import GpuTargetRunner

RESULTS = {  # what a kernel gives to each token, and whether that belongs to a layer
    "embed": (("embedding",), False),
    "norm_linear": (("residual sum", "norm and query-key-value product"), True),
    "rotate_attend": (("attention",), True),
    "norm_gated_linear": (("second residual sum", "norm and gated product"), True),
    "norm_routed_mlp": (("second residual sum", "routed experts"), True),
    "add_norm": (("last residual sum", "final norm"), False),
}
PRODUCTS = {  # by the kernel before it
    "rotate_attend": (("output product of attention",), True),
    "norm_gated_linear": (("down product",), True),
    "add_norm": (("head",), False),
}


def find_difference(runner: TargetRunner, done: Pass, request: int, node: int) -> Difference:
    """Of a pass that has run, where the logits of this node differ. Slots are left as the pass left them."""
    assert isinstance(runner, GpuTargetRunner)
    slot, tree = done.trees[request]
    path, shape = path_to(tree, node), done.describe(request)
    if done.is_prompt and len(tree) > runner.longest_piece(len(done.trees)):
        return Difference("prompt in several passes", shape, node)  # each is a piece that was compared before
    done.rewind(runner)
    alone = [_trace(runner, partial(read_token, runner, slot, tree.token_ids[at])) for at in path]
    done.rewind(runner)
    together = _trace(runner, partial(done.run, runner))  # last, so that its rows are those in the slot
    count = round_up(max(len(tree) for _, tree in done.trees), PROMPT_TOKENS if done.is_prompt else runner.buckets)
    for place, (operation, found) in enumerate(together):
        is_head = done.is_prompt and place == len(alone[0]) - 1  # it is shown each piece's last token alone
        for at, plain in [(path[-1], alone[-1])] if is_head else zip(path, alone, strict=True):
            if found[request if is_head else request * count + at] != plain[place][1][0]:
                return Difference(operation, shape, at)
    return Difference(None, shape, node)


def _trace(runner: GpuTargetRunner, run: Callable[[], object]) -> list[tuple[str, list[int]]]:
    """Operations of a pass in order, with what each gave to every row."""
    tracer = Tracer(runner.fused.layers.kernels)
    with runner.unrecorded(cast(Kernels, tracer)):
        run()
    return [(operation, found.tolist()) for operation, found in tracer.notes]


class Tracer:
    """Kernels that note what they give."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._layer, self._last = -1, ""
        self.notes: list[tuple[str, Tensor]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(self._kernels, name)
        if name not in RESULTS and name != "linear":
            return kernel

        def run(*given: Any, **options: Any) -> Any:
            results = kernel(*given, **options)
            self._note(name, results if isinstance(results, tuple) else (results,))
            return results

        return run

    def _note(self, name: str, results: Sequence[Tensor | Parts]) -> None:
        words, is_layered = PRODUCTS[self._last] if name == "linear" else RESULTS[name]
        self._layer += name == "norm_linear"
        for word, result in zip(words, results, strict=True):
            operation = f"layer {self._layer}, {word}" if is_layered else word
            self.notes.append((operation, fingerprint(_add(result) if isinstance(result, Parts) else result)))
        self._last = name


def _add(parts: Parts) -> Tensor:
    """In order, as whoever reads them does."""
    if parts.num_parts == 1:
        return parts.values
    total = parts.values[0].float()
    for part in parts.values[1:]:
        total = total + part
    return total


def fingerprint(values: Tensor) -> Tensor:
    """One number for each row [N, size], which follows every bit of it."""
    return (bits(values).long() * _factors(values.shape[1], values.device)).sum(dim=1)  # wraps around


@lru_cache(maxsize=32)
def _factors(size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.randint(-(2**62), 2**62, (size,), generator=generator) * 2 + 1).to(device)
