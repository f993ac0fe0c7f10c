"""EAGLE-3: the layer against a plain rewrite of it, and its checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.eagle3_format import parse_eagle3_config, save_eagle3
from blockpilot.models.loading import check_fit, load_drafter
from tests.support import causal_attend
from tests.tiny import CONFIGS, VOCAB_SIZE, make_eagle3, make_llm

LENGTH = 11


def inputs(seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(LENGTH, 32, generator=generator),
        torch.randn(LENGTH, 96, generator=generator),
        torch.arange(LENGTH),
    )


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """One head [8] at one position, pair by pair."""
    out = x.clone()
    for i in range(4):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / 8))
        out[i] = x[i] * angle.cos() - x[i + 4] * angle.sin()
        out[i + 4] = x[i + 4] * angle.cos() + x[i] * angle.sin()
    return out


def reference(tensors: dict[str, Tensor], embeddings: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """The published layer on checkpoint tensors, token by token and head by head."""
    layer = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items() if "midlayer." in name}
    hidden = taps @ tensors["fc.weight"].T
    x = torch.cat([norm(embeddings, layer["input_layernorm.weight"]), norm(hidden, layer["hidden_norm.weight"])], dim=1)
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T).view(LENGTH, -1, 8).transpose(0, 1).contiguous()
        for name in "qkv"
    )
    read = torch.zeros(LENGTH, 32)
    for head in range(4):
        for i in range(LENGTH):
            query = rotate(q[head, i], i)
            scores = torch.stack([query @ rotate(k[head // 2, j], j) / 8**0.5 for j in range(i + 1)])
            read[i, head * 8 : head * 8 + 8] = scores.softmax(0) @ v[head // 2, : i + 1]
    out = hidden + read @ layer["self_attn.o_proj.weight"].T
    mixed = norm(out, layer["post_attention_layernorm.weight"])
    gated = F.silu(mixed @ layer["mlp.gate_proj.weight"].T) * (mixed @ layer["mlp.up_proj.weight"].T)
    out = out + gated @ layer["mlp.down_proj.weight"].T
    return out, norm(out, tensors["norm.weight"]) @ tensors["lm_head.weight"].T


def test_matches_a_plain_rewrite(tmp_path: Path) -> None:
    model = make_eagle3()
    save_eagle3(model, tmp_path)
    embeddings, taps, positions = inputs()
    hidden = model(embeddings, model.fuse(taps), positions, causal_attend)
    expected, expected_logits = reference(load_file(tmp_path / "model.safetensors"), embeddings, taps)
    assert torch.allclose(hidden, expected, atol=2e-5)
    assert torch.allclose(model.logits(hidden), expected_logits, atol=1e-4)


def test_every_parameter_gets_a_gradient() -> None:
    model = make_eagle3()
    embeddings, taps, positions = inputs()
    hidden = model(embeddings, model.fuse(taps), positions, causal_attend)
    hidden = model(embeddings, hidden, positions + 1, causal_attend)  # fed back, as in training
    model.logits(hidden).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_the_skip_connection_may_carry_the_normed_hidden() -> None:
    model = make_eagle3()
    embeddings, taps, positions = inputs()
    fused = model.fuse(taps)
    plain = model(embeddings, fused, positions, causal_attend)
    model.midlayer.is_residual_normed = True
    normed = model(embeddings, fused, positions, causal_attend)
    model.midlayer.is_residual_normed = False
    assert not torch.allclose(plain, normed)
    model.midlayer.self_attn.o_proj.weight.data.zero_()
    model.midlayer.mlp.down_proj.weight.data.zero_()
    assert torch.equal(model(embeddings, fused, positions, causal_attend), fused)
    model.midlayer.is_residual_normed = True
    assert torch.equal(model(embeddings, fused, positions, causal_attend), model.midlayer.hidden_norm(fused))


def same(first: Eagle3, second: Eagle3) -> bool:
    theirs = second.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize("has_embedding", [False, True])
def test_round_trip(tmp_path: Path, has_embedding: bool) -> None:
    model = make_eagle3("llama3-rope", has_embedding=has_embedding)
    save_eagle3(model, tmp_path)
    loaded = load_drafter(str(tmp_path), torch.float32, num_target_layers=3)
    assert loaded.config == replace(model.config, layers=replace(model.config.layers, eos_token_ids=()))
    assert same(model, loaded) and (loaded.embed_tokens is not None) == has_embedding
    assert torch.equal(loaded.rotary.inverse_frequencies, model.rotary.inverse_frequencies)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert torch.equal(stored["d2t"] + torch.arange(40), model.draft_token_ids)
    assert stored["t2d"].nonzero()[:, 0].tolist() == model.draft_token_ids.tolist()
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (32, 64)


def test_reads_the_speculators_layout(tmp_path: Path) -> None:
    model = make_eagle3()
    save_eagle3(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    own = {key: raw.pop(key) for key in ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")}
    del raw["eagle_config"], raw["num_target_layers"], raw["architectures"]
    top = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": raw}
    (tmp_path / "config.json").write_text(json.dumps(top | own | {"norm_before_residual": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    loaded = load_drafter(str(tmp_path), torch.float32, num_target_layers=3)
    assert same(model, loaded) and loaded.config.tap_layers == (0, 1, 2)
    assert loaded.midlayer.is_residual_normed


def raw_config(**changes: object) -> dict[str, object]:
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 61, "hidden_size": 32}
    raw |= {"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
    return raw | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 17, 32)),  # the defaults 2, 36 / 2, 36 - 3 name inputs
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, (1, 17, 32)),
        ({"aux_hidden_state_layer_ids": [3, 4, 5]}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, (1, 17, 32)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 9, 36],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 8, 35]},
            },
            (0, 8, 35),
        ),
    ],
)
def test_tap_ids_become_outputs(changes: dict[str, object], expected: tuple[int, ...]) -> None:
    assert parse_eagle3_config(raw_config(**changes), "here", num_target_layers=36).tap_layers == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported"),
        ({"model_type": "qwen3"}, "model_type='qwen3' is not supported"),
        ({"draft_vocab_size": 62}, "draft_vocab_size 62 does not lie in 1..vocab_size 61"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "must name 3 layers, got 2"),
        ({"norm_before_fc": True}, "norm_before_fc=True is not supported"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            },
            "name other layers",
        ),
    ],
)
def test_bad_configs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_eagle3_config(raw_config(**changes), "here", num_target_layers=36)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", None, "missing tensors: d2t"),
        ("d2t", torch.zeros(40), "d2t must be 40 integers"),
        ("d2t", torch.full((40,), 50), "outside the vocabulary of 61"),
        ("d2t", -torch.arange(40), "d2t names ids twice"),
        ("t2d", torch.zeros(61, dtype=torch.bool), "t2d and d2t name different tokens"),
        ("midlayer.hidden_norm.weight", None, "missing tensors: midlayer.hidden_norm.weight"),
        ("fc.weight", torch.zeros(32, 64), r"fc.weight has shape \[32, 64\], expected \[32, 96\]"),
        ("extra", torch.zeros(1), "unexpected tensors: extra"),
    ],
)
def test_bad_tensors(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    save_eagle3(make_eagle3(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_drafter(str(tmp_path), torch.float32, num_target_layers=3)


def test_a_whole_head_needs_no_map(tmp_path: Path) -> None:
    save_eagle3(make_eagle3(draft_vocab_size=VOCAB_SIZE), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}, tmp_path / "model.safetensors")
    loaded = load_drafter(str(tmp_path), torch.float32, num_target_layers=3)
    assert loaded.draft_token_ids.tolist() == list(range(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "target_hidden_size is 32 in the drafter and 48 in the target"),
        ({"vocab_size": 62}, "vocab_size is 61 in the drafter and 62 in the target"),
        ({"num_layers": 4}, "num_target_layers is 3 in the drafter and 4 in the target"),
    ],
)
def test_fit(changes: dict[str, int], message: str) -> None:
    check_fit(make_eagle3().config, CONFIGS["llama"], "tiny")
    with pytest.raises(InputError, match=f"drafter tiny does not fit its target: {message}"):
        check_fit(make_eagle3().config, replace(CONFIGS["llama"], **changes), "tiny")


def test_fit_of_taps_and_width() -> None:
    config = make_eagle3().config
    with pytest.raises(InputError, match=r"tap layers \[-1, 3\] of 3 layers"):
        check_fit(replace(config, tap_layers=(-1, 1, 3)), CONFIGS["llama"], "tiny")
    narrow = replace(config, layers=replace(config.layers, hidden_size=16))
    with pytest.raises(InputError, match="hidden_size is 16 in the drafter and 32 in the target"):
        check_fit(narrow, CONFIGS["llama"], "tiny")
    check_fit(replace(narrow, has_embedding=True), CONFIGS["llama"], "tiny")


def test_a_folder_names_its_kind(tmp_path: Path) -> None:
    save_eagle3(make_eagle3(has_embedding=True), tmp_path / "head")
    llm = make_llm(drafter=str(tmp_path / "head"))
    assert llm.drafter is not None and llm.drafter.name == "head" and llm.drafter.tap_layers == (0, 1, 2)
    (tmp_path / "head" / "config.json").write_text(json.dumps({"architectures": ["MedusaModel"]}))
    with pytest.raises(InputError, match=r"\['MedusaModel'\] name no drafter; known: DFlashDraftModel, .*Eagle3,"):
        make_llm(drafter=str(tmp_path / "head"))
