import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub import errors

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models.export import MARKER, export_target
from blockpilot.models.loading import load_target
from blockpilot.text.tokenizer import Tokenizer
from tests.support import byte_vocabulary_fields, decoder_logits, reference_logits, save_reference
from tests.unit.models.gguf_files import VOCAB_SIZE, write_gguf

TOKEN_IDS = torch.arange(40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole Hugging Face folder with tokenizer."""
    path = tmp_path / "model"
    save_reference(path, "llama", vocab_size=VOCAB_SIZE)
    Tokenizer.from_gguf(byte_vocabulary_fields(num_tokens=VOCAB_SIZE), "test.gguf").save(path)
    return path


def test_load_a_folder(folder: Path) -> None:
    target = load_target(str(folder), torch.float32)
    assert (target.name, target.path) == (str(folder), folder)
    assert target.tokenizer.decode(target.tokenizer.encode("hello")) == "hello"


def test_load_and_export_a_gguf_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = save_reference(tmp_path / "reference", "llama", vocab_size=VOCAB_SIZE, tie_word_embeddings=True)
    write_gguf(tmp_path / "tiny.gguf", model)
    out = export_target(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(out)
    expected = reference_logits(model, TOKEN_IDS)
    assert (reference_logits(theirs, TOKEN_IDS) - expected).abs().max() < 1e-4
    assert theirs.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(out)("hello 12").input_ids == Tokenizer.from_folder(out).encode("hello 12")
    ours = load_target(str(out), torch.float32)
    assert (decoder_logits(ours.decoder, TOKEN_IDS) - expected).abs().max() < 1e-4


def test_export_replaces_an_earlier_export_only(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "export"
    export_target(str(folder), out)
    (out / "left_over.txt").touch()
    export_target(str(folder), out)
    assert not (out / "left_over.txt").exists()
    assert json.loads((out / MARKER).read_text()) == {"source": str(folder)}
    assert [path.name for path in out.parent.iterdir()] == ["export"]
    with pytest.raises(InputError, match="not empty and not an earlier export"):
        export_target(str(folder), folder)
    with pytest.raises(InputError, match="not a folder"):
        export_target(str(folder), folder / "config.json")
    (tmp_path / "empty").mkdir()
    export_target(str(folder), tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_failed_export_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Tokenizer, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Tokenizer, "save", fail)
    with pytest.raises(BlockPilotError, match="No space left"):
        export_target(str(folder), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_unknown_targets_list_what_is_accepted(tmp_path: Path) -> None:
    for spec in ("smollm", "no/such/folder", "absent/file.gguf", "./relative", ""):
        with (
            pytest.raises(InputError, match=r"smollm2-135m.*\.gguf file or a hub id")
            if spec
            else pytest.raises(InputError)
        ):
            load_target(spec, torch.float32)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"no \.gguf"):
        load_target(str(tmp_path / "notes.txt"), torch.float32)


def test_a_tokenizer_too_large_for_the_model_is_refused(folder: Path) -> None:
    save_reference(folder, "llama", vocab_size=16)
    with pytest.raises(InputError, match="do not belong together"):
        load_target(str(folder), torch.float32)


def response(code: int) -> Any:
    return httpx2.Response(code, request=httpx2.Request("GET", "https://example.org"))


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (errors.GatedRepoError("no", response=response(403)), InputError, "is gated"),
        (errors.RepositoryNotFoundError("no", response=response(404)), InputError, "neither a local path nor"),
        (errors.LocalEntryNotFoundError("no\nnetwork"), BlockPilotError, "out of reach"),
        (errors.OfflineModeIsEnabled("offline"), BlockPilotError, "out of reach"),
        (errors.HFValidationError("bad"), InputError, "not a usable hub id"),
    ],
)
def test_hub_failures_are_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, kind: type[Exception], message: str
) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(kind, match=message) as caught:
        load_target("org/name", torch.float32)
    assert "\n" not in str(caught.value)


def test_hub_models_load_from_their_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository, allow_patterns: str(folder))
    target = load_target("org/name", torch.float32)
    assert (target.name, target.path) == ("org/name", folder)
