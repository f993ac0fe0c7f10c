"""DFlash and DFlash 2 against a plain reading of the method: whole sequence, no cache, one token at a time."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.engine.assemble import build_drafter
from blockpilot.models.dflash import BlockConvolution, DFlash
from blockpilot.models.dflash_format import dflash_names
from blockpilot.models.weights import disassemble
from tests.tiny import make_decoder, make_dflash, make_placement

LENGTH, BLOCK, ANCHOR = 9, 7, 12


class Reference:
    """The drafter from its checkpoint tensors, in double precision, recomputing everything for every block."""

    def __init__(self, model: DFlash) -> None:
        self.config, self.shapes = model.config, model.config.layers
        self.tensors = {name: t.double() for name, t in disassemble(model, dflash_names(model.config)).items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.shapes.norm_eps).sqrt() * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """x [heads, dim]: pair (i, i + dim / 2) turns by position * theta ** (-2 i / dim)."""
        half = x.shape[-1] // 2
        turned = x.clone()
        for i in range(half):
            angle = position * self.shapes.rope.theta ** (-2 * i / x.shape[-1])
            turned[:, i] = x[:, i] * math.cos(angle) - x[:, i + half] * math.sin(angle)
            turned[:, i + half] = x[:, i + half] * math.cos(angle) + x[:, i] * math.sin(angle)
        return turned

    def heads(self, x: Tensor, layer: str, kind: str, position: int | None) -> Tensor:
        """Queries, keys or values of one token [heads, dim]; queries and keys are normalised and rotated."""
        split = self.linear(x, f"{layer}.self_attn.{kind}_proj").view(-1, self.shapes.head_dim)
        return split if position is None else self.rotate(self.norm(split, f"{layer}.self_attn.{kind}_norm"), position)

    def attention(self, block: Tensor, context: Tensor, layer: str) -> Tensor:
        """Every block token sees all context features and the whole block."""
        everyone = torch.cat((context, block))
        keys = [self.heads(x, layer, "k", position) for position, x in enumerate(everyone)]
        values = [self.heads(x, layer, "v", None) for x in everyone]
        group = self.shapes.num_heads // self.shapes.num_kv_heads
        rows = []
        for offset, x in enumerate(block):
            queries = self.heads(x, layer, "q", len(context) + offset)
            heads = []
            for head in range(self.shapes.num_heads):
                logits = torch.stack([queries[head] @ key[head // group] for key in keys]) / self.shapes.head_dim**0.5
                weights = logits.softmax(0)
                heads.append(sum(w * value[head // group] for w, value in zip(weights, values, strict=True)))
            rows.append(torch.cat(heads))
        return self.linear(torch.stack(rows), f"{layer}.self_attn.o_proj")

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        gated = F.silu(self.linear(x, f"{layer}.mlp.gate_proj")) * self.linear(x, f"{layer}.mlp.up_proj")
        return self.linear(gated, f"{layer}.mlp.down_proj")

    def convolve(self, x: Tensor, side: int, source: Tensor, name: str) -> Tensor:
        """out[i, c] = sum over t of (base[t, c] + delta[i, t, group(c)]) * x[i - t, c]; deltas come from `source`."""
        kernel, groups = self.config.conv_kernel_size, self.shapes.hidden_size // self.config.conv_group_size
        deltas = self.linear(source, f"{name}.kernel_projection").view(len(x), 2, kernel, groups)
        base = self.tensors[f"{name}.base_kernel"][side]
        out = torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(kernel, i + 1)):
                for channel in range(x.shape[1]):
                    weight = base[tap, channel] + deltas[i, side, tap, channel // self.config.conv_group_size]
                    out[i, channel] += weight * x[i - tap, channel]
        return out

    def sublayer(self, x: Tensor, norm: str, conv: str, run) -> Tensor:
        normed = self.norm(x, norm)
        if not self.config.conv_kernel_size:
            return x + run(normed)
        inner = run(self.convolve(normed, 0, normed, conv))
        return x + self.convolve(inner, 1, normed, conv)

    def hidden(self, taps: Tensor, block: Tensor) -> Tensor:
        context = self.norm(self.linear(taps.double(), "fc"), "hidden_norm")
        x = block.double()
        for index in range(self.shapes.num_layers):
            name = f"layers.{index}"
            x = self.sublayer(
                x,
                f"{name}.input_layernorm",
                f"{name}.attention_conv",
                lambda y, name=name: self.attention(y, context, name),
            )
            x = self.sublayer(
                x, f"{name}.post_attention_layernorm", f"{name}.mlp_conv", lambda y, name=name: self.mlp(y, name)
            )
        return self.norm(x, "norm")

    def selector_score(self, parent: int, hidden: Tensor, child: int) -> float:
        gate = self.linear(hidden, "candidate_selector.hidden_projection")
        parents, children = (self.tensors[f"candidate_selector.{k}_codebook"] for k in ("predecessor", "successor"))
        return float((parents[parent] * gate * children[child]).sum())


def run_drafter(is_second: bool):
    """Candidates, hidden states of the drafted positions, their logits, and the reference's hidden states."""
    model, decoder = make_dflash(is_second=is_second), make_decoder()
    reference = Reference(model)
    drafter = build_drafter(
        model,
        decoder,
        make_placement(num_slots=1),
    )
    assert isinstance(drafter, DFlashDrafter)
    seen: list[Tensor] = []
    head = drafter.head
    drafter.head = lambda hidden: head(seen.append(hidden) or hidden)  # type: ignore[func-returns-value]
    torch.manual_seed(4)
    taps = torch.randn(LENGTH, 2 * 32)
    drafter.observe([Observation(0, [0] * LENGTH, taps)])
    request = DraftRequest(
        slot=0, anchor_id=ANCHOR, position=LENGTH, block_size=BLOCK, num_candidates=5, params=SamplingParams()
    )
    candidates = drafter.propose([request])[0]
    block = decoder.embed_tokens.weight[[ANCHOR] + [model.config.mask_token_id] * (BLOCK - 1)].detach()
    expected = reference.hidden(taps, block)[1:]
    return candidates, seen[0], reference, expected, expected @ decoder.lm_head.weight.detach().double().T


@pytest.mark.parametrize("is_second", [False, True])
def test_hidden_states_and_candidates_match_the_reference(is_second: bool) -> None:
    candidates, hidden, _, expected, logits = run_drafter(is_second)
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-5, atol=2e-5)  # float32 against float64
    best = logits.topk(5, dim=-1)
    np.testing.assert_array_equal(candidates.token_ids, best.indices.numpy())
    expected_scores = best.values - logits.logsumexp(-1, keepdim=True)
    np.testing.assert_allclose(candidates.log_probs, expected_scores.numpy(), rtol=1e-5, atol=1e-5)


def test_selector_scores_match_the_reference() -> None:
    candidates, _, reference, hidden, logits = run_drafter(is_second=True)
    assert candidates.first is not None and candidates.pairwise is not None
    ids = candidates.token_ids.tolist()

    def conditional(position: int, parent: int) -> np.ndarray:
        scores = [
            logits[position, child] + reference.selector_score(parent, hidden[position], child)
            for child in ids[position]
        ]
        return torch.stack(scores).log_softmax(0).numpy()

    np.testing.assert_allclose(candidates.first, conditional(0, ANCHOR), rtol=1e-5, atol=1e-5)
    for position in range(1, BLOCK - 1):
        for rank, parent in enumerate(ids[position - 1]):
            np.testing.assert_allclose(
                candidates.pairwise[position - 1, rank], conditional(position, parent), rtol=1e-5, atol=1e-5
            )


def test_parts_of_the_second_generation_change_the_draft() -> None:
    """Guards the comparison above: without convolutions or selector the numbers would differ."""
    first, second = run_drafter(is_second=False), run_drafter(is_second=True)
    assert (first[1] - second[1]).abs().max() > 0.1
    assert first[0].pairwise is None
    assert not np.allclose(second[0].pairwise[0, 0], second[0].pairwise[0, 1])


def test_a_new_convolution_is_the_identity() -> None:
    convolution = BlockConvolution(hidden_size=8, kernel_size=2, group_size=4)
    x = torch.randn(5, 8)
    for side in (0, 1):
        out = convolution.apply_side(side, x, convolution.deltas(x), torch.tensor([0, 1, 2, 0, 1]))
        torch.testing.assert_close(out, x)


def test_no_tap_reaches_over_the_start_of_a_block() -> None:
    torch.manual_seed(0)
    convolution = BlockConvolution(hidden_size=8, kernel_size=3, group_size=2)
    torch.nn.init.normal_(convolution.base_kernel)
    torch.nn.init.normal_(convolution.kernel_projection.weight)
    x = torch.randn(7, 8)
    packed = convolution.apply_side(0, x, convolution.deltas(x), torch.tensor([0, 1, 2, 3, 0, 1, 2]))
    alone = [convolution.apply_side(0, p, convolution.deltas(p), torch.arange(len(p))) for p in (x[:4], x[4:])]
    torch.testing.assert_close(packed, torch.cat(alone))
