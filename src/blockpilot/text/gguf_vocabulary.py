"""A byte-level BPE tokenizer built from the vocabulary inside a GGUF file.

GGUF stores tokens, their types and the merges, but names the way text is cut into words only by a short label (`pre`).
The labels we know are listed here; any other is an error, because a wrong cut gives different tokens without a sign.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from blockpilot.core.errors import InputError

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

_WORDS_WITH_DIGIT_RUNS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORDS_WITH_DIGIT_RUNS.format(digits=digits))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), _BYTES])


_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": _WORDS,
    "llama-bpe": _split_words(r"\p{N}{1,3}"),
    "qwen2": _split_words(r"\p{N}"),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _WORDS]),
}


def build_backend(fields: Mapping[str, Any], where: str) -> Backend:
    """The tokenizer of `tokenizer.ggml.*` fields; `where` names the file in errors."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise InputError(f"{where}: tokenizer model {kind!r} is not supported; only byte-level BPE ('gpt2') is")
    if pre not in _PRE_TOKENIZERS:
        raise InputError(f"{where}: pre-tokenizer {pre!r} is not supported; known: {', '.join(_PRE_TOKENIZERS)}")
    tokens, types = _required(fields, "tokens", where), _required(fields, "token_type", where)
    if len(tokens) != len(types):
        raise InputError(f"{where}: {len(tokens)} tokens but {len(types)} token types; the file is damaged")
    # padding entries never stand for text: leave them out, so that they decode to nothing
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _required(fields, "merges", where)]
    try:
        # Llama 3 takes a word that is itself a token whole, whatever the merges say
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{where}: vocabulary and merges do not fit together ({error})") from error
    backend = Backend(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    defined = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    # user-defined tokens (<think>) are matched whole too, but belong to the visible text
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
    return backend


def _required(fields: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = fields.get(f"tokenizer.ggml.{key}")
    if not value:
        raise InputError(f"{where}: field tokenizer.ggml.{key} is missing")
    return list(value)
