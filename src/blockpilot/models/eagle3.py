"""EAGLE-3: an autoregressive drafter of one layer that continues the target's own hidden states.

It reads pairs. The pair at position i is the embedding of token i + 1 and the hidden state of position i, and it
predicts token i + 2. For text that the target has read, the hidden state is `fuse` of three of its layers (taps). Ahead
of that text it is the drafter's own output for the pair before, so a draft is an unrolled loop:

    pair                                     position   predicts
    (embedding of the anchor p, taps p - 1)   p - 1      token p + 1
    (embedding of token p + 1, output before) p          token p + 2   ...

Rotary positions are those of the hidden state, one less than those of the token: the same in training and drafting.
The state that is fed back is the layer's output before the final norm; `logits` norms it for the head, whose rows are
a part of the target's vocabulary (`draft_token_ids`).

Training unrolls the loop from every position of a text at once (`training/text_passes.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockpilot.models.config import DecoderConfig
from blockpilot.models.decoder import MLP, Attend, Attention, RMSNorm, Rotary

NUM_TAPS = 3


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    layers: DecoderConfig  # shapes of the one draft layer; architecture llama; vocab_size is the target's
    draft_vocab_size: int  # rows of the drafter's own head
    tap_layers: tuple[int, ...]  # three 0-based target layers whose outputs are read
    num_target_layers: int
    target_hidden_size: int
    has_embedding: bool = False  # an embedding of its own; otherwise the target's is used
    is_residual_normed: bool = False  # speculators' norm_before_residual: the skip connection carries the normed hidden


class _Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the normed embedding beside the normed hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        shapes = config.layers
        self.is_residual_normed = config.is_residual_normed
        self.hidden_norm = RMSNorm(shapes.hidden_size, shapes.norm_eps)
        self.input_layernorm = RMSNorm(shapes.hidden_size, shapes.norm_eps)
        self.self_attn = Attention(shapes, 0, input_size=2 * shapes.hidden_size)
        self.post_attention_layernorm = RMSNorm(shapes.hidden_size, shapes.norm_eps)
        self.mlp = MLP(shapes.hidden_size, shapes.intermediate_size)

    def forward(self, embeddings: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.is_residual_normed else hidden
        x = residual + self.self_attn(self._join(embeddings, normed), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def keys_values(self, embeddings: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        _, keys, values = self.self_attn.project(self._join(embeddings, self.hidden_norm(hidden)), rotation)
        return keys, values

    def _join(self, embeddings: Tensor, normed: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embeddings), normed), dim=-1)  # [N, 2H]


class Eagle3(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        shapes = config.layers
        self.fc = nn.Linear(NUM_TAPS * config.target_hidden_size, shapes.hidden_size, bias=False)
        self.midlayer = _Eagle3Layer(config)
        self.norm = RMSNorm(shapes.hidden_size, shapes.norm_eps)
        self.lm_head = nn.Linear(shapes.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(shapes.rope, shapes.head_dim)
        self.embed_tokens: nn.Embedding | None = None
        if config.has_embedding:
            self.embed_tokens = nn.Embedding(shapes.vocab_size, shapes.hidden_size)
        self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        self.draft_token_ids: Tensor  # [draft vocab]: the target's id of every row of the head

    def fuse(self, taps: Tensor) -> Tensor:
        """Hidden states [N, H] of tokens the target has read, from their taps [N, 3 * target H]."""
        return self.fc(taps)

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs [N, H] of packed pairs, before the final norm; `positions` [N] are those of `hidden`."""
        return self.midlayer(embeddings, hidden, self.rotary(positions, hidden.dtype), attend)

    def keys_values(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Only what later pairs read of these: keys and values [N, Hkv, D]. Context needs no more."""
        return self.midlayer.keys_values(embeddings, hidden, self.rotary(positions, hidden.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, draft vocab] of outputs [N, H]; column j stands for the target's token `draft_token_ids[j]`."""
        return self.lm_head(self.norm(hidden))
