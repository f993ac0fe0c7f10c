"""Where two passes part on a CPU: the first layer whose output, or the head, gives a token other bits than its plain
pass does."""

import torch
from torch import Tensor

from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.decoding.probe_passes import Difference, Pass, bits, path_to
from blockpilot.decoding.target import TargetRunner


def find_difference(runner: TargetRunner, done: Pass, request: int, node: int) -> Difference:
    """Of a pass that has run, where the logits of this node differ. Slots are left as the pass left them."""
    assert isinstance(runner, CpuTargetRunner)
    slot, tree = done.trees[request]
    path, shape = path_to(tree, node), done.describe(request)
    done.rewind(runner)
    with runner.recording() as alone:
        for at in path:
            runner.verify([(slot, tree.chain(tree.token_ids[at], []))], ())
            runner.keep([(slot, (0,))])
    done.rewind(runner)
    with runner.recording() as together:  # last, so that its rows are those in the slot
        done.run(runner)
    first = sum(len(other) for _, other in done.trees[:request])
    for layer in range(runner.decoder.config.num_layers):
        for at, plain in zip(path, alone, strict=True):
            if _differ(together[0], first + at, plain, layer):
                return Difference(f"layer {layer}", shape, at)
    return Difference("head", shape, node)


def _differ(outputs: Tensor, row: int, plain: Tensor, layer: int) -> bool:
    """Of the outputs [tokens, layers, H] of all layers."""
    return not torch.equal(bits(outputs[row, layer]), bits(plain[0, layer]))
