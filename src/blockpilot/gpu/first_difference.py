"""Where two passes part: the first operation that gives a token other bits than its plain pass does.

Both run kernel by kernel, outside of any recording, with kernels that take a fingerprint of what every token gets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from blockpilot.core.tree import DraftTree
from blockpilot.gpu.buckets import CHECK_TOKENS, PROMPT_TOKENS, REQUESTS, largest_below, round_up
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
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True)
class Difference:
    operation: str | None  # None: kernel by kernel the pass is right
    shape: str
    token: int  # its place among its request's tokens

    def __str__(self) -> str:
        if self.operation is None:
            return f"recorded pass ({self.shape}): token {self.token} differs; run kernel by kernel it does not"
        return f"{self.operation} ({self.shape}): token {self.token} differs from its plain pass"


@dataclass(frozen=True)
class Pass:
    """Trees (slot, tree) that are checked together behind `starts` rows, or pieces of prompts, as chains."""

    trees: Sequence[tuple[int, DraftTree]]
    starts: Sequence[int]
    is_prompt: bool = False

    def describe(self, request: int) -> str:
        """In the words of one of its requests."""
        tree, num_requests = self.trees[request][1], len(self.trees)
        kind = "prompt piece" if self.is_prompt else "chain" if tree.is_chain else "tree"
        counts = [f"{len(tree)} token{'s'[: len(tree) > 1]}", f"{num_requests} request{'s'[: num_requests > 1]}"]
        return f"{kind} of {', '.join(counts)}, start {self.starts[request]}"

    def run(self, runner: GpuTargetRunner) -> Tensor:
        """Logits of all nodes, or of each piece's last token; valid until the next pass. Only pieces are committed."""
        if self.is_prompt:
            return runner.prefill([(slot, list(tree.token_ids)) for slot, tree in self.trees], ()).logits
        result = runner.verify(self.trees, ())
        runner.keep([(slot, ()) for slot, _ in self.trees])
        firsts = zip(result.row_starts, self.trees, strict=True)
        return torch.cat([result.logits[first : first + len(tree)] for first, (_, tree) in firsts])

    def rewind(self, runner: GpuTargetRunner) -> None:
        for (slot, _), start in zip(self.trees, self.starts, strict=True):
            runner.cache.rewind(slot, start)


def bits(values: Tensor) -> Tensor:
    """As integers: zeros of either sign differ, and a NaN equals itself."""
    return values.contiguous().view(_INTEGERS[values.element_size()])


def read_token(runner: GpuTargetRunner, slot: int, token_id: int) -> Tensor:
    """Logits [V] of a token in a plain pass of its own, valid until the next; the token is committed."""
    logits = runner.verify([(slot, DraftTree.chain(token_id, []))], ()).logits[0]
    runner.keep([(slot, (0,))])
    return logits


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the anchor to this one."""
    path = [node]
    while path[-1]:
        path.append(tree.parents[path[-1]])
    return path[::-1]


def find_difference(runner: GpuTargetRunner, done: Pass, request: int, node: int) -> Difference:
    """Of a pass that has run, where the logits of this node differ. Slots are left as the pass left them."""
    slot, tree = done.trees[request]
    path, shape = path_to(tree, node), done.describe(request)
    if done.is_prompt and len(tree) > longest_piece(runner, len(done.trees)):
        return Difference("prompt in several passes", shape, node)  # each is a piece that was compared before
    done.rewind(runner)
    alone = [_trace(runner, partial(read_token, runner, slot, tree.token_ids[at])) for at in path]
    done.rewind(runner)
    together = _trace(runner, partial(done.run, runner))  # last, so that its rows are those in the slot
    count = round_up(max(len(tree) for _, tree in done.trees), PROMPT_TOKENS if done.is_prompt else CHECK_TOKENS)
    for place, (operation, found) in enumerate(together):
        is_head = done.is_prompt and place == len(alone[0]) - 1  # it is shown each piece's last token alone
        for at, plain in [(path[-1], alone[-1])] if is_head else zip(path, alone, strict=True):
            if found[request if is_head else request * count + at] != plain[place][1][0]:
                return Difference(operation, shape, at)
    return Difference(None, shape, node)


def longest_piece(runner: GpuTargetRunner, num_requests: int) -> int:
    """Tokens of each prompt that one pass reads."""
    return largest_below(runner.max_rows // round_up(num_requests, REQUESTS), PROMPT_TOKENS)


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
