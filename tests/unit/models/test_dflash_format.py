"""DFlash checkpoints: written and read again, read from speculators, refused where they do not fit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockpilot.core.errors import InputError
from blockpilot.models.dflash_format import dflash_config_dict, parse_dflash_config, save_dflash
from blockpilot.models.loading import check_fit, load_drafter
from tests.tiny import CONFIGS, VOCAB_SIZE, make_dflash


def edit_config(folder: Path, change: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


def edit_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(params=[False, True], ids=["dflash", "dflash2"])
def is_second(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_round_trip(is_second: bool, tmp_path: Path) -> None:
    model = make_dflash(is_second=is_second)
    save_dflash(model, tmp_path)
    loaded = load_drafter(str(tmp_path), torch.float32)
    unused = {} if is_second else {"conv_group_size": 8, "selector_top_k": 5}  # not stored where nothing uses them
    assert replace(loaded.config, layers=model.config.layers, **unused) == model.config
    assert replace(loaded.config.layers, is_tied=True, eos_token_ids=()) == replace(
        model.config.layers, is_tied=True, eos_token_ids=()
    )
    ours, theirs = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
    torch.testing.assert_close(loaded.rotary.inverse_frequencies, model.rotary.inverse_frequencies)
    assert loaded.draft_token_ids is None


def test_written_names_are_those_of_the_public_format(is_second: bool, tmp_path: Path) -> None:
    save_dflash(make_dflash(is_second=is_second), tmp_path)
    raw, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert raw["architectures"] == ["DFlash2DraftModel" if is_second else "DFlashDraftModel"]
    assert raw["model_type"] == "qwen3"
    assert raw["dflash_config"]["target_layer_ids"] == [0, 2]
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_proj.weight"} <= tensors.keys()
    assert tensors["layers.0.mlp.gate_proj.weight"].shape == (48, 32)
    assert not any(name.startswith(("model.", "lm_head", "embed_tokens")) for name in tensors)
    if is_second:
        assert tensors["layers.1.mlp_conv.base_kernel"].shape == (2, 2, 32)
        assert tensors["layers.0.attention_conv.kernel_projection.weight"].shape == (2 * 2 * 4, 32)
        assert tensors["candidate_selector.successor_codebook"].shape == (VOCAB_SIZE, 6)


def test_head_rows_travel_with_the_drafter(tmp_path: Path) -> None:
    model = make_dflash()
    model.draft_token_ids = torch.tensor([5, 1, 60])
    save_dflash(model, tmp_path)
    loaded = load_drafter(str(tmp_path), torch.bfloat16)
    assert loaded.draft_token_ids is not None
    assert loaded.draft_token_ids.tolist() == [5, 1, 60]
    assert loaded.norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "rows", [torch.tensor([5, 61]), torch.tensor([-1]), torch.tensor([1.0]), torch.zeros(0).long()]
)
def test_bad_head_rows_are_refused(rows: torch.Tensor, tmp_path: Path) -> None:
    save_dflash(make_dflash(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(draft_token_ids=rows))
    with pytest.raises(InputError, match="draft_token_ids"):
        load_drafter(str(tmp_path), torch.float32)


@pytest.mark.parametrize("key", ["num_target_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    save_dflash(make_dflash(), tmp_path)
    edit_config(tmp_path, lambda raw: raw.pop(key))
    with pytest.raises(InputError, match=f"config.json: key '{key}' is missing"):
        load_drafter(str(tmp_path), torch.float32)


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_a_missing_option_is_named(key: str, tmp_path: Path) -> None:
    save_dflash(make_dflash(), tmp_path)
    edit_config(tmp_path, lambda raw: raw["dflash_config"].pop(key))
    with pytest.raises(InputError, match=f"'{key}' is missing"):
        load_drafter(str(tmp_path), torch.float32)


def test_a_value_of_the_wrong_kind_is_one_clear_line(tmp_path: Path) -> None:
    save_dflash(make_dflash(), tmp_path)
    edit_config(tmp_path, lambda raw: raw["dflash_config"].update(mask_token_id=None))
    with pytest.raises(InputError, match=r"config\.json"):
        load_drafter(str(tmp_path), torch.float32)


def test_block_size_may_stand_among_the_options() -> None:
    raw = dflash_config_dict(make_dflash().config, torch.float32)
    raw["dflash_config"]["block_size"] = raw.pop("block_size")
    assert parse_dflash_config(raw, "here").block_size == 8


@pytest.mark.parametrize(
    "option",
    [
        {"use_swa": True},
        {"causal": True},
        {"is_causal": True},
        {"final_logit_softcapping": 30.0},
        {"output_multiplier": 0.5},
        {"input_embedding_scale": 2},
    ],
)
def test_what_we_cannot_run_is_named(option: dict[str, Any]) -> None:
    raw = dflash_config_dict(make_dflash().config, torch.float32)
    raw["dflash_config"] |= option
    with pytest.raises(InputError, match=next(iter(option))):
        parse_dflash_config(raw, "here")


def test_another_model_is_no_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(InputError, match=r"LlamaForCausalLM.*name no drafter"):
        load_drafter(str(tmp_path), torch.float32)


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.q_norm.weight"])
def test_missing_and_unexpected_tensors_are_named(name: str, tmp_path: Path) -> None:
    save_dflash(make_dflash(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(InputError, match=f"missing tensors: {name}"):
        load_drafter(str(tmp_path), torch.float32)
    save_dflash(make_dflash(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(stranger=torch.zeros(1)))
    with pytest.raises(InputError, match="unexpected tensors: stranger"):
        load_drafter(str(tmp_path), torch.float32)


def write_speculators(folder: Path, **changes: Any) -> None:
    """The same drafter as speculators writes it: nested shapes, layer ids that count the embedding as 0."""
    save_dflash(make_dflash(), folder)
    raw = json.loads((folder / "config.json").read_text())
    shapes = {k: v for k, v in raw.items() if k not in ("dflash_config", "block_size", "num_target_layers")}
    shapes.pop("architectures")
    wrapped = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 8,
        "mask_token_id": VOCAB_SIZE - 1,
        "draft_vocab_size": VOCAB_SIZE,
        "target_hidden_size": 32,
        "sliding_window_non_causal": True,
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": shapes,
    }
    (folder / "config.json").write_text(json.dumps(wrapped | changes))
    copies = {"embed_tokens.weight": torch.zeros(VOCAB_SIZE, 32), "lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}
    edit_tensors(folder, lambda tensors: tensors.update(copies))


def test_the_speculators_format_is_read(tmp_path: Path) -> None:
    write_speculators(tmp_path)
    loaded, model = load_drafter(str(tmp_path), torch.float32), make_dflash()
    assert loaded.config.tap_layers == (0, 2)
    assert (loaded.config.block_size, loaded.config.mask_token_id) == (8, VOCAB_SIZE - 1)
    assert torch.equal(loaded.fc.weight, model.fc.weight)
    check_fit(loaded.config, CONFIGS["llama"], "here")  # the format does not say how deep its target is


def test_a_reduced_speculators_vocabulary_is_refused(tmp_path: Path) -> None:
    write_speculators(tmp_path, draft_vocab_size=32)
    with pytest.raises(InputError, match="draft_vocab_size"):
        load_drafter(str(tmp_path), torch.float32)


def test_copies_of_the_targets_weights_are_unexpected_in_our_own_format(tmp_path: Path) -> None:
    save_dflash(make_dflash(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(VOCAB_SIZE, 32)}))
    with pytest.raises(InputError, match=r"unexpected tensors: lm_head\.weight"):
        load_drafter(str(tmp_path), torch.float32)


@pytest.mark.parametrize(("field", "theirs"), [("hidden_size", 64), ("vocab_size", 100), ("num_layers", 5)])
def test_a_drafter_of_another_target_names_the_field_and_both_values(field: str, theirs: int) -> None:
    target = replace(CONFIGS["llama"], **{field: theirs})  # type: ignore[arg-type]
    ours = getattr(CONFIGS["llama"], field)
    name = "num_target_layers" if field == "num_layers" else field
    with pytest.raises(InputError, match=f"{name} is {ours} in the drafter and {theirs} in the target"):
        check_fit(make_dflash().config, target, "mine")


def test_taps_and_mask_must_exist_in_the_target() -> None:
    config, target = make_dflash().config, CONFIGS["llama"]
    check_fit(config, target, "mine")
    with pytest.raises(InputError, match=r"tap layers \[3\] of 3 layers"):
        check_fit(replace(config, tap_layers=(0, 3)), target, "mine")
    with pytest.raises(InputError, match="mask_token_id 61 lies outside the vocabulary of 61"):
        check_fit(replace(config, mask_token_id=61), target, "mine")
