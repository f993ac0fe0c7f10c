from pathlib import Path

import pytest

from blockpilot.core.errors import InputError
from blockpilot.text.chat_template import compile_template, render_template
from blockpilot.text.tokenizer import Tokenizer
from tests.support import byte_vocabulary_fields

USER = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return render_template(compile_template(source), USER, {"bos_token": "<s>"})


def test_variables_functions_and_whitespace() -> None:
    assert render("{{ bos_token }}{{ eos_token }}|{{ messages[0].content }}") == "<s>|hi"
    assert render("{% if add_generation_prompt and not enable_thinking %}\n  yes\n{% endif %}") == "  yes\n"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ '<é>' | tojson }}") == '"<é>"'
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for m in [1, 2] %}{% break %}{% endfor %}-") == "-"


def test_errors_are_one_line() -> None:
    with pytest.raises(InputError, match="does not parse"):
        compile_template("{% if %}")
    with pytest.raises(InputError, match="refused the conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_templates_are_sandboxed() -> None:
    with pytest.raises(InputError, match="refused"):
        render("{{ messages.append(1) }}")
    with pytest.raises(InputError, match="refused"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


def test_encode_chat_and_missing_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(byte_vocabulary_fields(), "test.gguf")
    assert tokenizer.chat_template is not None
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat("hello") == tokenizer.encode(text)
    bare = Tokenizer.from_gguf(byte_vocabulary_fields() | {"tokenizer.chat_template": None}, "test.gguf")
    assert bare.chat_template is None
    with pytest.raises(InputError, match="no chat template"):
        bare.encode_chat("hello")


def test_template_file_wins_over_settings(tmp_path: Path) -> None:
    Tokenizer.from_gguf(byte_vocabulary_fields(), "test.gguf").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(tmp_path).apply_chat_template(USER) == "file"
