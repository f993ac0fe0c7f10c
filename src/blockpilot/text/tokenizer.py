"""Text to token ids and back, for every model we load.

One class whatever the source: a Hugging Face folder or the vocabulary inside a GGUF file. Nothing is ever added to the
text behind the caller's back; the only special tokens are those written in it, which is what a chat template does.
`save` writes the files from which `transformers`, vLLM and SGLang load the same tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE, ensure_folder, read_bytes, read_text, write_text
from blockpilot.core.reading import convert, read_json
from blockpilot.text.chat_template import ChatTemplate, Message
from blockpilot.text.detokenizer import Pieces

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}  # as GGUF files say
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
MAX_TOKENIZER_BYTES, MAX_SETTINGS_BYTES = 512 * MEGABYTE, 16 * MEGABYTE
MAX_TEMPLATE_BYTES = MEGABYTE
MAX_TOKENS = 2**22

_TokenId = Annotated[int, Meta(ge=0, lt=MAX_TOKENS)]
_Template = Annotated[str, Meta(max_length=MAX_TEMPLATE_BYTES)]
_Vocabulary = TypedDict(  # the fields of a GGUF file that we read
    "_Vocabulary",
    {
        "tokenizer.ggml.model": str,
        "tokenizer.ggml.pre": str,
        "tokenizer.ggml.tokens": Annotated[list[str], Meta(max_length=MAX_TOKENS)],
        "tokenizer.ggml.token_type": list[int],
        "tokenizer.ggml.merges": list[str],
        "tokenizer.chat_template": _Template,
        "tokenizer.ggml.bos_token_id": int,
        "tokenizer.ggml.eos_token_id": int,
        "tokenizer.ggml.eot_token_id": int,
        "tokenizer.ggml.eom_token_id": int,
        "tokenizer.ggml.unknown_token_id": int,
        "tokenizer.ggml.padding_token_id": int,
    },
    total=False,
)


class _SpecialToken(TypedDict, total=False):
    content: str


class _NamedTemplate(TypedDict, total=False):
    name: str
    template: _Template


class _Settings(TypedDict, total=False):
    """What we read of tokenizer_config.json and special_tokens_map.json."""

    bos_token: str | _SpecialToken | None
    eos_token: str | _SpecialToken | None
    unk_token: str | _SpecialToken | None
    pad_token: str | _SpecialToken | None
    model_max_length: float | None  # 1e30 where there is no limit
    chat_template: _Template | list[_NamedTemplate] | None


class _Ends(TypedDict, total=False):
    eos_token_id: _TokenId | Annotated[list[_TokenId], Meta(max_length=1024)] | None


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


class Tokenizer:
    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        context_length: int | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)  # role (bos_token, ...) -> text
        self.chat_template = chat_template
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.context_length = context_length

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json and the small files beside it."""
        backend = _read_backend(folder / "tokenizer.json")
        settings = _read_settings(folder / "tokenizer_config.json", _Settings)
        special = _special_texts(_read_settings(folder / "special_tokens_map.json", _Settings) | settings)
        length = settings.get("model_max_length")
        return cls(
            backend,
            special_tokens=special,
            chat_template=_find_template(folder, settings),
            eos_token_ids=_eos_ids(folder, backend, special.get("eos_token")),
            context_length=int(length) if length and 1 <= length < 10**9 else None,
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], where: str) -> "Tokenizer":
        """Build from GGUF metadata, already read as plain values; `where` names the file in errors."""
        given = {key: fields[key] for key in _Vocabulary.__annotations__ if fields.get(key) is not None}
        fields = {**fields, **convert(given, _Vocabulary, where)}
        backend = _build_backend(fields, where)
        tokens = fields["tokenizer.ggml.tokens"]
        ids = {role: fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
        ends = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        if fields["tokenizer.ggml.pre"] == "qwen2":  # files name the end of a message; a text has one of its own
            ends.append(backend.token_to_id("<|endoftext|>"))
        for index in [*ids.values(), *ends]:
            if index is not None and not 0 <= index < len(tokens):
                raise InputError(f"{where}: special token id {index} lies outside the vocabulary of {len(tokens)}")
        return cls(
            backend,
            special_tokens={role: tokens[index] for role, index in ids.items() if index is not None},
            chat_template=fields.get("tokenizer.chat_template"),
            eos_token_ids=[index for index in ends if index is not None],
            context_length=fields.get(f"{fields.get('general.architecture')}.context_length"),
        )

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def highest_id(self) -> int:
        """Some vocabularies leave out ids."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @cached_property
    def pieces(self) -> Pieces | None:
        """The text of single tokens, for vocabularies of bytes; other decoders look at a token's neighbours."""
        return Pieces(self.decode) if isinstance(self.backend.decoder, decoders.ByteLevel) else None

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """The conversation as the text the model expects, ending where its answer starts."""
        return self._template.render(messages, self.special_tokens)

    def encode_chat(self, prompt: str) -> list[int]:
        return self.encode(self.apply_chat_template([{"role": "user", "content": prompt}]))

    def encode_chats(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Many conversations, on all cores."""
        texts = [self.apply_chat_template(messages) for messages in chats]
        return [found.ids for found in self.backend.encode_batch(texts, add_special_tokens=False)]

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InputError("this model has no chat template; give the prompt raw")
        return ChatTemplate(self.chat_template)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
        ensure_folder(folder)
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.context_length or 10**30,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / "special_tokens_map.json", json.dumps(self.special_tokens, indent=2) + "\n")


def _read_backend(path: Path) -> Backend:
    if not path.is_file():
        raise InputError(f"{path} is missing: the folder needs a tokenizer.json")
    content = read_bytes(path, MAX_TOKENIZER_BYTES)
    try:
        return Backend.from_buffer(content)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises plain Exception, and where it gives up not even that
        raise InputError(f"{path} is not a readable tokenizer: {_one_line(error)}") from error


def _read_settings(path: Path, kind: Any) -> dict[str, Any]:
    """Empty where there is no file."""
    return read_json(path, kind, most=MAX_SETTINGS_BYTES) or {}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _special_texts(settings: dict[str, Any]) -> dict[str, str]:
    """Roles to text; older files store a token as an object with its text under `content`."""
    found = {role: settings.get(role) for role in _ROLES}
    texts = {role: value.get("content") if isinstance(value, dict) else value for role, value in found.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _find_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path, MAX_TEMPLATE_BYTES)
    template: Any = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        return next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template


def _eos_ids(folder: Path, backend: Backend, eos_token: str | None) -> list[int]:
    """generation_config.json decides, as in transformers; config.json and the tokenizer stand in for it."""
    for name in ("generation_config.json", "config.json"):
        value = _read_settings(folder / name, _Ends).get("eos_token_id")
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    index = backend.token_to_id(eos_token) if eos_token else None
    return [] if index is None else [index]


def _build_backend(fields: Mapping[str, Any], where: str) -> Backend:
    """A byte-level BPE tokenizer from the `tokenizer.ggml.*` fields of a GGUF file; `where` names it in errors.

    GGUF stores tokens, their types and the merges, but names the way text is cut into words only by a short label
    (`pre`). A label that we do not know is an error, because a wrong cut gives different tokens without a sign.
    """
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise InputError(
            f"{where}: tokenizer model {repr(kind)[:80]} is not supported; only byte-level BPE ('gpt2') is"
        )
    if pre not in _PRE_TOKENIZERS:
        raise InputError(
            f"{where}: pre-tokenizer {repr(pre)[:80]} is not supported; known: {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens, types = _required(fields, "tokens", where), _required(fields, "token_type", where)
    if len(tokens) != len(types):
        raise InputError(f"{where}: {len(tokens)} tokens but {len(types)} token types; the file is damaged")
    # padding entries never stand for text: leave them out, so that they decode to nothing
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _required(fields, "merges", where)]
    if odd := next((merge for merge in merges if len(merge) != 2), None):
        raise InputError(f"{where}: merge {odd[0][:80]!r} joins no two tokens; the file is damaged")
    try:
        # Llama 3 takes a word that is itself a token whole, whatever the merges say
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{where}: vocabulary and merges do not fit together ({_one_line(error)})") from error
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
