import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blockpilot.core.errors import InputError
from blockpilot.text.chat_template import ChatTemplate
from blockpilot.text.tokenizer import Tokenizer
from tests.support import byte_vocabulary_fields

USER = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(source).render(USER, {"bos_token": "<s>"})


def test_variables_functions_and_whitespace() -> None:
    assert render("{{ bos_token }}{{ eos_token }}|{{ messages[0].content }}") == "<s>|hi"
    assert render("{% if add_generation_prompt and not enable_thinking %}\n  yes\n{% endif %}") == "  yes\n"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ '<é>' | tojson }}") == '"<é>"'
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for m in [1, 2] %}{% break %}{% endfor %}-") == "-"


def test_errors_are_one_line() -> None:
    with pytest.raises(InputError, match="does not parse"):
        ChatTemplate("{% if %}")
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


def grow(start: str, step: str, end: str = "") -> str:
    """A template that makes a value out of itself, again and again."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for a in range(99) %}}{step}{{% endfor %}}{end}"


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}"
BRANCH = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
LONG = "{% set x = 'x' * 999999 %}"
HOSTILE = {
    "loops": NESTED + "{% endfor %}{% endfor %}",
    "loops that print": NESTED + "x{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "macros that branch": BRANCH,
    "a loop that calls itself": "{% for a in [[1, 2]] recursive %}{{ loop([[1, 2]]) }}{% endfor %}",
    "a long range": "{{ range(10 ** 12) | list }}",
    "padding": "{{ 'x' | center(10 ** 10) }}",
    "padding by a method": "{{ 'x'.center(10 ** 10) }}",
    "padding in small steps": NESTED + "{% set x = 'x'.ljust(9999) %}{% endfor %}{% endfor %}",
    "zeros": "{{ '1'.zfill(10 ** 10) }}",
    "tabs": "{{ '\\t'.expandtabs(10 ** 10) }}",
    "repetition": "{{ 'x' * 10 ** 10 }}",
    "repeated lists": "{{ ([1] * 10 ** 9) | length }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "products": grow("3", "{% set ns.x = ns.x * ns.x %}"),
    "doubling": grow("'xx'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubling by a sum": grow("'xx'", "{% set ns.x = ns.x + ns.x %}"),
    "doubling by a block": grow("'xx'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "doubling by lists": grow("[1]", "{% set ns.x = [ns.x, ns.x] %}", "{{ ns.x }}"),
    "doubling by dictionaries": grow("{}", "{% set ns.x = dict(a=ns.x, b=ns.x) %}", "{{ ns.x | tojson }}"),
    "formats": "{{ '%1000000000d' % 1 }}",
    "formats with a width as argument": "{{ '%*d' % (1000000000, 1) }}",
    "formats by the filter": "{{ '%1000000000d' | format(1) }}",
    "formats by a method": "{{ '{:>1000000000}'.format(1) }}",
    "formats with nested widths": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "formats of a map": "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "blind text": "{{ lipsum(n=100000) }}",
    "joining": "{{ (('x' * 99999) ~ 'y').join(('a,' * 99999).split(',')) }}",
    "joining lazily": LONG + "{{ range(99999) | map('string') | map('replace', '', x) | join }}",
    "joining one text often": LONG + "{{ ([{'a': x}] * 99) | map(attribute='a') | join }}",
    "replacing": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "replacing nothing": "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
    "translating": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "indenting": "{{ ('\\n' * 999999) | indent(9999) }}",
    "deep indenting": "{{ ([1] * 99999) | tojson(indent=9999) }}",
    "filling": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slicing": "{{ [1] | slice(10 ** 9) | list }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 9) }}",
    "many variables": LONG + "".join(f"{{% set v{number} = x ~ 1 %}}" for number in range(999)),
    "deep nesting": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep blocks": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "deep loops": "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
    "a long source": "{{ a }}" * 99999,
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_templates_have_bounds(source: str) -> None:
    started = time.thread_time()
    with pytest.raises(InputError, match="chat template"):
        render(source)
    assert time.thread_time() - started < 20, "a bound on work, not a measurement"


def test_bounds_let_real_conversations_through() -> None:
    long = [{"role": "user", "content": "word " * 400_000}] * 3
    step = "{% set ns.text = ns.text ~ '<|' ~ message['role'] ~ '|>' + message['content'] | trim %}"
    source = "{% set ns = namespace(text='') %}{% for message in messages %}" + step + "{% endfor %}{{ ns.text }}"
    assert len(ChatTemplate(source).render(long, {})) == 3 * (len("<|user|>") + 5 * 400_000 - 1)
    many = [{"role": "user", "content": "hi"}] * 5000
    assert ChatTemplate("{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}").render(many, {})


def test_renderings_of_several_threads_do_not_mix() -> None:
    template = ChatTemplate("{% for m in messages %}{% for i in range(2000) %}{{ m.content }}{% endfor %}{% endfor %}")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: template.render([{"role": "user", "content": str(n)}], {}), range(40)))
    assert found == [str(n) * 2000 for n in range(40)]
