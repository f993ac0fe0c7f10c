from pathlib import Path

import pytest
from transformers import AutoTokenizer

from blockpilot.core.errors import InputError
from blockpilot.text.tokenizer import Tokenizer
from tests.support import byte_vocabulary_fields

TEXTS = [
    "hello world 12345",
    "it's 3.14, isn't it?\n\n\tdef f(x):  return x",
    "héllo 😀 漢字 e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


def tiny(pre: str = "smollm") -> Tokenizer:
    return Tokenizer.from_gguf(byte_vocabulary_fields(pre), "test.gguf")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(pre: str, text: str) -> None:
    import unicodedata

    tokenizer = tiny(pre)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == expected


def test_digits_split_as_the_pre_tokenizer_says() -> None:
    token = byte_vocabulary_fields()["tokenizer.ggml.tokens"].index("12")
    assert token not in tiny("smollm").encode("12")
    assert token not in tiny("qwen2").encode("12")
    assert tiny("llama-bpe").encode("12") == [token]


def test_special_tokens_are_recognised_and_skipped() -> None:
    tokenizer = tiny()
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == (2,)


def test_user_defined_tokens_are_whole_but_visible() -> None:
    fields = byte_vocabulary_fields()
    fields["tokenizer.ggml.tokens"].append("<think>")
    fields["tokenizer.ggml.token_type"].append(4)
    tokenizer = Tokenizer.from_gguf(fields, "test.gguf")
    ids = tokenizer.encode("<think>hello")
    assert ids[0] == tokenizer.vocab_size - 1
    assert ids[0] not in tokenizer.special_ids
    assert tokenizer.decode(ids) == "<think>hello"


def test_padding_tokens_decode_to_nothing() -> None:
    tokenizer = Tokenizer.from_gguf(byte_vocabulary_fields(num_tokens=300), "test.gguf")
    assert tokenizer.decode([299]) == ""


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.pre", "tekken", "'tekken' is not supported; known: gpt-2"),
        ("tokenizer.ggml.model", "llama", "'llama' is not supported"),
        ("tokenizer.ggml.merges", None, "merges is missing"),
        ("tokenizer.ggml.merges", ["q xyz"], "do not fit together"),
        ("tokenizer.ggml.token_type", [1], "token types"),
        ("tokenizer.ggml.eos_token_id", 99999, "99999 lies outside"),
    ],
)
def test_bad_vocabularies_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Tokenizer.from_gguf(byte_vocabulary_fields() | {key: value}, "test.gguf")


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
def test_saved_folder_loads_in_transformers_and_here(pre: str, tmp_path: Path) -> None:
    tokenizer = tiny(pre)
    tokenizer.save(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        expected = tokenizer.encode(text)
        assert theirs(text).input_ids == expected
        assert ours.encode(text) == expected
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    # an export's generation_config.json has all ends
    assert (ours.special_ids, ours.eos_token_ids) == (tokenizer.special_ids, tokenizer.eos_token_ids[:1])
    messages = [{"role": "user", "content": "hello 12"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == ours.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)


def test_generation_config_decides_on_eos(tmp_path: Path) -> None:
    tiny().save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("length", "expected"),
    [("2048", 2048), ("2048.0", 2048), ("1e30", None), ("1000000000000000019884624838656", None), ("-1", None)],
)
def test_a_length_without_limit_is_none(length: str, expected: int | None, tmp_path: Path) -> None:
    tiny().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"model_max_length": {length}}}')
    assert Tokenizer.from_folder(tmp_path).context_length == expected


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs a tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="not a readable tokenizer"):
        Tokenizer.from_folder(tmp_path)
