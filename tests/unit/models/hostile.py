"""Hostile and damaged model files: builders and examples, for tests and for programs that mutate them."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.support import TINY, byte_vocabulary_fields

HUGE = 2**62
TYPES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<B"), "u64": (10, "<Q")}
STRING, ARRAY = 8, 9
Field = tuple[str, int, bytes]  # name, type, value


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def string(name: str, value: str | bytes, length: int | None = None) -> Field:
    return name, STRING, text(value, length)


def number(name: str, kind: str, value: float) -> Field:
    code, form = TYPES[kind]
    return name, code, struct.pack(form, value)


def array(name: str, code: int, items: Sequence[bytes], count: int | None = None) -> Field:
    return name, ARRAY, struct.pack("<IQ", code, len(items) if count is None else count) + b"".join(items)


def tensor(
    name: str, shape: Sequence[int] = (4,), kind: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def gguf_bytes(
    fields: Sequence[Field] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_fields: int | None = None,
    data: bytes = bytes(64),
) -> bytes:
    counts = len(tensors) if num_tensors is None else num_tensors, len(fields) if num_fields is None else num_fields
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(text(name) + struct.pack("<I", code) + value for name, code, value in fields) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def model_fields() -> dict[str, Field]:
    """A header that is right, by name."""
    vocabulary = byte_vocabulary_fields()
    strings, numbers = ("tokens", "merges"), ("bos_token_id", "eos_token_id")
    found = [string(f"tokenizer.ggml.{key}", vocabulary[f"tokenizer.ggml.{key}"]) for key in ("model", "pre")]
    found += [_strings(f"tokenizer.ggml.{key}", vocabulary[f"tokenizer.ggml.{key}"]) for key in strings]
    types = [struct.pack("<i", kind) for kind in vocabulary["tokenizer.ggml.token_type"]]
    found += [array("tokenizer.ggml.token_type", TYPES["i32"][0], types)]
    found += [number(f"tokenizer.ggml.{key}", "u32", vocabulary[f"tokenizer.ggml.{key}"]) for key in numbers]
    shapes = {"embedding_length": 32, "feed_forward_length": 48, "block_count": 2, "context_length": 256}
    shapes |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    found += [number(f"llama.{key}", "u32", value) for key, value in shapes.items()]
    found += [number("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5), string("general.architecture", "llama")]
    return {field[0]: field for field in found}


def _strings(name: str, values: Sequence[str]) -> Field:
    return array(name, STRING, [text(value) for value in values])


def with_field(field: Field, tensors: Sequence[bytes] = ()) -> bytes:
    """A header that is right but for one field."""
    return gguf_bytes(list((model_fields() | {field[0]: field}).values()), tensors)


GGUF_FILES: dict[str, tuple[bytes, str]] = {  # what is wrong: content, and what the error says
    "nothing": (b"", "not a GGUF file"),
    "magic alone": (b"GGUF", "truncated"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "big endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "2^62 tensors": (gguf_bytes(num_tensors=HUGE), "names 4611686018427387904 tensors"),
    "2^62 fields": (gguf_bytes(num_fields=HUGE), "names 4611686018427387904 fields"),
    "30000 tensors": (gguf_bytes(num_tensors=30_000), "truncated"),
    "16000 fields": (gguf_bytes(num_fields=16_000), "truncated"),
    "2^62 numbers": (gguf_bytes([array("a", 4, [], HUGE)]), "arrays may hold"),
    "2^62 strings": (gguf_bytes([array("a", STRING, [], HUGE)]), "arrays may hold"),
    "2 million numbers": (gguf_bytes([array("a", 10, [], 2**21)]), "truncated"),
    "a million strings": (gguf_bytes([array("a", STRING, [], 2**20)]), "truncated"),
    "many arrays": (gguf_bytes([array(f"a{i}", 0, [bytes(2**20)], 2**20) for i in range(3)]), "arrays may hold"),
    "an array of arrays": (gguf_bytes([array("a", ARRAY, [struct.pack("<IQ", 4, 1)] * 9)]), "an array of arrays"),
    "an unknown type": (gguf_bytes([("a", 77, bytes(8))]), "type 77"),
    "an array of an unknown type": (gguf_bytes([array("a", 77, [bytes(8)])]), "type 77"),
    "a string of 2^62 bytes": (gguf_bytes([string("a", "b", HUGE)]), "may have"),
    "a string beyond the end": (gguf_bytes([string("a", "b", 10**6)]), "truncated"),
    "a list with a string of 2^62 bytes": (gguf_bytes([array("a", STRING, [text("b", HUGE)])]), "truncated"),
    "a name of 2^62 bytes": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(64), "may have 256"),
    "a name that breaks the line": (gguf_bytes([string("a\nb", "")]), r"'a\\nb'"),
    "no UTF-8": (gguf_bytes([string("a", b"\xff\xfe")]), "not UTF-8"),
    "no UTF-8 in a list": (gguf_bytes([array("a", STRING, [text(b"\xff")])]), "not UTF-8"),
    "a field twice": (gguf_bytes([string("a", ""), string("a", "")]), "field a is there twice"),
    "a tensor twice": (gguf_bytes([], [tensor("t"), tensor("t", offset=32)]), "tensor t is there twice"),
    "no dimension": (gguf_bytes([], [tensor("t", ())]), "0 dimensions"),
    "2^32 dimensions": (gguf_bytes([], [tensor("t", dimensions=2**32 - 1)]), "4294967295 dimensions"),
    "no rows": (gguf_bytes([], [tensor("t", (4, 0))]), r"shape \[4, 0\]"),
    "a product that overflows": (gguf_bytes([], [tensor("t", (2**32, 2**32, 4, 1))]), "truncated"),
    "an unknown kind": (gguf_bytes([], [tensor("t", kind=4)]), "type 4, which is not known"),
    "half of a block": (gguf_bytes([], [tensor("t", (48,), kind=8)]), "no multiple of the 32 of Q8_0"),
    "an offset of 2^62": (gguf_bytes([], [tensor("t", offset=HUGE)]), "truncated"),
    "an odd offset": (gguf_bytes([], [tensor("t", offset=8)]), "no multiple of 32"),
    "tensors in each other": (gguf_bytes([], [tensor("t", (9,)), tensor("u", offset=32)]), "inside of another"),
    "alignment 0": (gguf_bytes([number("general.alignment", "u32", 0)]), "no power of two"),
    "alignment 24": (gguf_bytes([number("general.alignment", "u32", 24)]), "no power of two"),
    "alignment 2^31": (gguf_bytes([number("general.alignment", "u32", 2**31)]), "no power of two"),
    "alignment in words": (gguf_bytes([string("general.alignment", "x")]), "no power of two"),
    "2^32 layers": (with_field(number("llama.block_count", "u32", 2**32 - 1)), r"<= 1024, at block_count"),
    "1000 layers": (with_field(number("llama.block_count", "u32", 1000), [tensor("t")]), "1000 layers"),
    "no heads": (with_field(number("llama.attention.head_count", "u32", 0)), r">= 1, at attention.head_count"),
    "heads per layer": (
        with_field(array("llama.attention.head_count", 4, [struct.pack("<I", n) for n in (4, 2)])),
        "head_count differs between layers",
    ),
    "heads in words": (with_field(string("llama.attention.head_count", "4")), "got str, at attention.head_count"),
    "a width of 2^32": (with_field(number("llama.embedding_length", "u32", 2**32 - 1)), "at embedding_length"),
    "an epsilon that is no number": (
        with_field(number("llama.attention.layer_norm_rms_epsilon", "f32", float("nan"))),
        "at attention.layer_norm_rms_epsilon",
    ),
    "an endless base": (with_field(number("llama.rope.freq_base", "f32", float("inf"))), "at rope.freq_base"),
    "scaling by a list": (with_field(array("llama.rope.scaling.type", 4, [])), "at rope.scaling.type"),
    "an architecture of numbers": (with_field(array("general.architecture", 4, [])), "architecture"),
    "tokens of numbers": (with_field(array("tokenizer.ggml.tokens", 4, [bytes(4)] * 9)), r"got int, at .*tokens"),
    "tokens in one": (with_field(string("tokenizer.ggml.tokens", "abc")), r"got str, at .*tokens"),
    "types in words": (with_field(_strings("tokenizer.ggml.token_type", ["a"])), r"got str, at .*token_type"),
    "a merge of one": (with_field(_strings("tokenizer.ggml.merges", ["ab"])), "merge 'ab' joins no two tokens"),
    "merges of numbers": (with_field(array("tokenizer.ggml.merges", 4, [bytes(4)])), "merges"),
    "an id in words": (with_field(string("tokenizer.ggml.eos_token_id", "2")), "at .*eos_token_id"),
    "an id outside": (with_field(number("tokenizer.ggml.eos_token_id", "u32", 2**31)), "lies outside"),
    "a negative id": (with_field(number("tokenizer.ggml.eos_token_id", "i32", -1)), "lies outside"),
    "a template of numbers": (with_field(number("tokenizer.chat_template", "u32", 1)), "at tokenizer.chat_template"),
    "a template of 2 MB": (with_field(string("tokenizer.chat_template", "x" * 2**21)), "at tokenizer.chat_template"),
}

LLAMA = TINY | {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA |= {"head_dim": 8, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
DFLASH = {key: value for key, value in LLAMA.items() if key != "rope_scaling"} | {
    "architectures": ["DFlash2DraftModel"],
    "block_size": 8,
    "num_target_layers": 2,
    "dflash_config": {
        "mask_token_id": 95,
        "target_layer_ids": [0, 1],
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": 5,
    },
}
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 2],
    "block_size": 8,
    "mask_token_id": 95,
    "transformer_layer_config": LLAMA,
}
EAGLE3 = {key: value for key, value in LLAMA.items() if key != "rope_scaling"} | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 40,
    "target_hidden_size": 32,
    "num_target_layers": 8,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "norm_before_residual": False,
}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # what is wrong: config.json, changes, the error
    "a billion layers": (LLAMA, {"num_hidden_layers": 10**9}, r"<= 1024, at num_hidden_layers"),
    "a billion experts": (MOE, {"num_experts": 10**9}, r"<= 4096, at num_experts"),
    "a million experts in all": (MOE, {"num_experts": 4096, "num_hidden_layers": 256}, "more than 65536 experts"),
    "more active experts than there are": (MOE, {"num_experts_per_tok": 7}, "7 is more than num_experts 6"),
    "no step between sparse layers": (MOE, {"decoder_sparse_step": 0}, r">= 1, at decoder_sparse_step"),
    "scaling in words": (LLAMA, {"rope_scaling": "linear"}, "got str, at rope_scaling"),
    "scaling by a kind of numbers": (LLAMA, {"rope_scaling": {"rope_type": [1]}}, "rope type"),
    "scaling by nothing": (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.*at factor"),
    "scaling per kind of layer": (LLAMA, {"rope_parameters": {"full_attention": {}}}, "rope type"),
    "equal bounds of scaling": (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}},
        "must be smaller than high_freq_factor",
    ),
    "layers of another kind": (LLAMA, {"layer_types": ["sliding_attention"]}, "sliding_attention"),
    "kinds of layers in one": (LLAMA, {"layer_types": "full_attention"}, "at layer_types"),
    "a switch in words": (LLAMA, {"tie_word_embeddings": "yes"}, "got str, at tie_word_embeddings"),
    "an architecture by number": (LLAMA, {"architectures": 3}, "got int, at architectures"),
    "no heads": (LLAMA, {"num_attention_heads": 0}, r">= 1, at num_attention_heads"),
    "no heads of keys": (LLAMA, {"num_key_value_heads": 0}, r">= 1, at num_key_value_heads"),
    "an odd head": (LLAMA, {"head_dim": 7}, "multiple of 2"),
    "heads wider than the model": (LLAMA, {"head_dim": None, "num_attention_heads": 64}, "hidden_size 32 by 64 heads"),
    "no epsilon": (LLAMA, {"rms_norm_eps": 0}, "at rms_norm_eps"),
    "an end before the first token": (LLAMA, {"eos_token_id": [2, -1]}, r"at eos_token_id\[1\]"),
    "a very long name": (LLAMA, {"architectures": ["x" * 10**6]}, r"architecture \['xxx"),
    "taps in words": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"target_layer_ids": ["a"]}}, "got str"),
    "taps before the first": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"target_layer_ids": [-1]}}, ">= 0"),
    "a mask that is no token": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"mask_token_id": 1.5}}, "float"),
    "a huge kernel": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"conv_kernel_size": 10**6}}, "kernel_size"),
    "no groups": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"conv_group_size": 0}}, "conv_group_size"),
    "odd groups": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"conv_group_size": 5}}, "no multiple of"),
    "a huge rank": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"selector_rank": 10**9}}, "selector_rank"),
    "a huge choice": (DFLASH, {"dflash_config": DFLASH["dflash_config"] | {"selector_top_k": 10**6}}, "selector_top_k"),
    "a huge block": (DFLASH, {"block_size": 10**9}, r"<= 1024, at block_size"),
    "an empty block": (DFLASH, {"block_size": 0}, r">= 1, at block_size"),
    "options in words": (DFLASH, {"dflash_config": "none"}, "got str, at dflash_config"),
    "speculators' shapes in a list": (SPECULATORS, {"transformer_layer_config": []}, "at transformer_layer_config"),
    "speculators' tap of the embedding": (SPECULATORS, {"aux_hidden_state_layer_ids": [0, 1]}, "aux_hidden_state"),
    "a head's taps in words": (EAGLE3, {"eagle_aux_hidden_state_layer_ids": "123"}, "got str, at eagle_aux"),
    "a head's options in words": (EAGLE3, {"eagle_config": "x"}, "got str, at eagle_config"),
    "a head's huge vocabulary": (EAGLE3, {"draft_vocab_size": 10**12}, "at draft_vocab_size"),
}
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 1.5, 1e300, 10**9, 2**63, 2**64, -(2**70)),
    *("", "yes", "x" * 10**5, [], [None], [1, "a"], [-1], [10**9], [[]], {}, {"a": {}}, {"rope_type": []}),
)
TOKENIZER_FILES: dict[str, tuple[str, str, str]] = {  # what is wrong: file, content, and what the error says
    "a list of settings": ("tokenizer_config.json", "[]", "got array"),
    "an end of numbers": ("tokenizer_config.json", '{"eos_token": 3}', "at eos_token"),
    "an end in a list": ("special_tokens_map.json", '{"eos_token": ["a"]}', "at eos_token"),
    "an end whose text is a number": ("tokenizer_config.json", '{"eos_token": {"content": 3}}', "at eos_token.content"),
    "a length in words": ("tokenizer_config.json", '{"model_max_length": "long"}', "at model_max_length"),
    "a template of numbers": ("tokenizer_config.json", '{"chat_template": 7}', "at chat_template"),
    "templates of numbers": ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 7}]}', "at"),
    "an id in words": ("generation_config.json", '{"eos_token_id": "2"}', "at eos_token_id"),
    "ids in words": ("generation_config.json", '{"eos_token_id": [2, "2"]}', r"at eos_token_id\[1\]"),
    "a negative id": ("generation_config.json", '{"eos_token_id": -2}', "at eos_token_id"),
    "endless nesting": ("generation_config.json", "[" * 10**5, "generation_config.json"),
    "a template of 2 MB": ("chat_template.jinja", "x" * 2**21, "larger than 1 MB"),
    "a tokenizer of numbers": ("tokenizer.json", "[1, 2]", "not a readable tokenizer"),
    "a prefix longer than all words": (
        "tokenizer.json",
        '{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], '
        '"continuing_subword_prefix": "too long"}}',
        "not a readable tokenizer",
    ),
    "a deep tokenizer": ("tokenizer.json", '{"model": ' + "[" * 10**5, "not a readable tokenizer"),
}
WEIGHT_MAPS: dict[str, tuple[Any, str]] = {  # what is wrong: content of the index, and what the error says
    "no map": ({}, "not a readable weight index"),
    "a list": ({"weight_map": ["a"]}, "got array, at weight_map"),
    "a file by number": ({"weight_map": {"a": 3}}, "got int"),
    "the folder above": ({"weight_map": {"a": "../model.safetensors"}}, "no safetensors file of this folder"),
    "another folder": ({"weight_map": {"a": "/etc/model.safetensors"}}, "no safetensors file of this folder"),
    "a folder below": ({"weight_map": {"a": "x/model.safetensors"}}, "no safetensors file of this folder"),
    "this folder": ({"weight_map": {"a": "."}}, "no safetensors file of this folder"),
    "no name": ({"weight_map": {"a": ""}}, "no safetensors file of this folder"),
    "another kind of file": ({"weight_map": {"a": "model.bin"}}, "no safetensors file of this folder"),
    "a name that ends early": ({"weight_map": {"a": "a\0.safetensors"}}, "no safetensors file of this folder"),
    "thousands of files": ({"weight_map": {str(i): f"{i}.safetensors" for i in range(5000)}}, "and 4992 more"),
}


def safetensors_bytes(header: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


SAFETENSORS_FILES: dict[str, bytes] = {
    "nothing": b"",
    "half of a length": b"\1\0",
    "a header of 2^62 bytes": safetensors_bytes(b"{}", HUGE),
    "a header of 90 MB": safetensors_bytes(b"{}", 90 << 20),
    "a header beyond the end": safetensors_bytes(b"{}", 1000),
    "a header of no JSON": safetensors_bytes(b"{{{{"),
    "a list": safetensors_bytes(b"[]"),
    "an unknown type": safetensors_bytes(b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)),
    "a negative size": safetensors_bytes(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', data=bytes(4)),
    "a product that overflows": safetensors_bytes(
        b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4]}}', data=bytes(4)
    ),
    "data beyond the end": safetensors_bytes(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
    "offsets that go back": safetensors_bytes(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', data=bytes(4)),
    "a name that breaks the line": safetensors_bytes(
        b'{"a\\nb":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)
    ),
    "a very long name": safetensors_bytes(
        b'{"' + b"a" * 5000 + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', data=bytes(4)
    ),
}


def with_odd_values(raw: Mapping[str, Any], values: Sequence[Any] = ODD_VALUES) -> Iterator[dict[str, Any]]:
    """A configuration with one value replaced: every value by every odd one, sections inside too."""
    for key, value in raw.items():
        for odd in values:
            yield {**raw, key: odd}
        if isinstance(value, dict):
            for inner in with_odd_values(value, values):
                yield {**raw, key: inner}
