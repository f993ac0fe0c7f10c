"""The only causal decoder: Llama, Qwen3 and Qwen3-MoE, told apart by switches in its config.

A pass takes packed tokens, not a batch: ids and positions of shape [N] and an `attend` function that knows which token
belongs to which request. It returns the final hidden states and, where a drafter asked for them, the outputs of chosen
layers ("taps"); no other hidden state outlives its layer. Logits are a separate call, so that prefill pays the head for
one position and not for the whole prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blockpilot.models.config import DecoderConfig
from blockpilot.models.layers import Attend, DecoderLayer, RMSNorm, Rotary


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.rope, config.head_dim)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, tap_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [N, H] before the final norm, and taps [N, len(tap_layers) * H] in the given order."""
        x = self.embed_tokens(token_ids)
        rotation = self.rotary(positions, x.dtype)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, attend)
            if index in tap_layers:
                kept[index] = x
        taps = torch.cat([kept[index] for index in tap_layers], dim=-1) if tap_layers else None
        return x, taps

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [N, V] of hidden states [N, H]."""
        return self.lm_head(self.norm(hidden))
