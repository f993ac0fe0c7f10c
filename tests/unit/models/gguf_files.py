"""Tiny GGUF files, written the way llama.cpp's converter writes them."""

import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from tests.support import byte_vocabulary_fields

VOCAB_SIZE = 288
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: str = "F32",
    kinds: dict[str, str] | None = None,
    extra: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Write a `transformers` model; return what each tensor is after quantization, by Hugging Face name.

    `kinds` are those of projections that differ from the others.
    """
    config = model.config
    architecture = config.model_type.replace("_", "")
    writer = gguf.GGUFWriter(path, architecture)
    _write_settings(writer, config, architecture)
    _write_vocabulary(writer)
    stored: dict[str, Tensor] = {}
    experts: dict[tuple[str, gguf.GGMLQuantizationType], list[NDArray[Any]]] = {}
    for name, tensor in _checkpoint_tensors(model).items():
        if ".experts." in name:
            data, quantization = _quantize(tensor.numpy(), kind)
            experts.setdefault((_expert_name(name), quantization), []).append(data)
            stored[name] = torch.from_numpy(np.array(gguf.dequantize(data, quantization)))
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        own = (kinds or {}).get(name.split(".")[-2], kind)
        stored[name] = _add(writer, name, tensor, kind=own, heads=heads if architecture == "llama" else None)
    for (full_name, quantization), parts in experts.items():
        writer.add_tensor(full_name, np.stack(parts), raw_dtype=quantization)
    for full_name, extra_tensor in (extra or {}).items():
        writer.add_tensor(full_name, extra_tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors as `save_pretrained` names them: one per expert, no tied head."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
    return dict(sorted(tensors.items(), key=lambda item: [part.zfill(3) for part in item[0].split(".")]))


def _expert_name(name: str) -> str:
    part = name.split(".")
    return f"blk.{part[2]}.ffn_{part[-2].removesuffix('_proj')}_exps.weight"


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, leaf = stem.split(".", 3)
        return f"blk.{index}.{NAMES[leaf]}.{kind}"
    return f"{NAMES[stem]}.weight"


def _add(writer: Any, name: str, tensor: Tensor, *, kind: str, heads: int | None) -> Tensor:
    values = tensor.numpy().astype(np.float32)
    rows = values.shape[0]
    if heads:  # the permutation of llama.cpp's converter
        values = values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
    data, quantization = _quantize(values, "F32" if name.endswith("mlp.gate.weight") else kind)  # routers stay
    writer.add_tensor(_gguf_name(name), data, raw_dtype=quantization)
    values = gguf.dequantize(data, quantization)
    if heads:
        values = values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _quantize(values: NDArray[np.float32], kind: str) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
    quantization = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
    return gguf.quantize(values, quantization), quantization


def _write_settings(writer: Any, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "qwen3" in architecture:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_vocabulary(writer: Any) -> None:
    fields = byte_vocabulary_fields(num_tokens=VOCAB_SIZE)
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"])
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])
    writer.add_token_merges(fields["tokenizer.ggml.merges"])
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"])
    writer.add_chat_template(fields["tokenizer.chat_template"])
