"""Small things that many tests need: dense attention, tiny reference models, a byte vocabulary."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import pre_tokenizers
from torch import Tensor

from blockpilot.core.draft import FloatArray, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.models.decoder import Decoder

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def child_log_probs(draft: HostDraft, position: int, parent_rank: int) -> FloatArray:
    """Scores [K] of the candidates at `position`, given the rank of the parent chosen at `position - 1`."""
    if draft.pairwise is None or draft.first is None:
        return draft.log_probs[position]
    return draft.first if position == 0 else draft.pairwise[position - 1, parent_rank]


def children_of(tree: DraftTree) -> list[dict[int, int]]:
    """For every node: drafted token id -> child index. The first of two equal siblings wins."""
    table: list[dict[int, int]] = [{} for _ in tree.token_ids]
    for index in range(1, len(tree)):
        table[tree.parents[index]].setdefault(tree.token_ids[index], index)
    return table


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from depth 1 to each node behind the anchor, node included."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        paths.append((*paths[tree.parents[node]], tree.token_ids[node]))
    return paths[1:]


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention over the N tokens of one sequence; q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq * D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, N, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@torch.inference_mode()
def decoder_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """Logits [N, V] of one sequence [N], without any cache."""
    hidden, _ = decoder(token_ids, torch.arange(len(token_ids)), causal_attend)
    return decoder.logits(hidden)


def save_reference(folder: Path, kind: str, **options: Any) -> Any:
    """A tiny random `transformers` model (llama, qwen2, qwen3, qwen3_moe), saved into `folder`."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**(TINY | {"initializer_range": 0.3} | options))).eval()
    with torch.no_grad():  # norms of all ones would hide a missing or swapped norm, as zeros would a bias
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def reference_logits(model: Any, token_ids: Tensor) -> Tensor:
    return model(token_ids[None]).logits[0]


def byte_vocabulary_fields(pre: str = "smollm", num_tokens: int | None = None) -> dict[str, Any]:
    """GGUF tokenizer fields: three control tokens, the 256 bytes, and a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    tokens = SPECIAL + letters + [merge.replace(" ", "") for merge in merges]
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    if num_tokens is not None:
        padding = num_tokens - len(tokens)
        tokens, types = tokens + [f"[PAD{i}]" for i in range(padding)], types + [5] * padding
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
