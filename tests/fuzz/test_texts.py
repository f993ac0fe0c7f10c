"""Random chat templates, and prompt files of every form."""

import gzip
import json
import lzma
import time
from pathlib import Path
from random import Random

from hypothesis import example

from blockpilot.text.chat_template import ChatTemplate
from blockpilot.text.prompts import read_prompts
from tests.fuzz.mutations import change_bytes, change_compressed, change_json
from tests.fuzz.profiles import SOURCES, fuzz, refuses
from tests.fuzz.templates import odd_template

MOST_SECONDS = 5.0  # of the processor
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is {{ it }}?"}]
LINES = b"\n".join(json.dumps({"id": place, "turns": [f"what is {place}", "and then"]}).encode() for place in range(4))


def render(source: str) -> None:
    text = ChatTemplate(source).render(MESSAGES, {"bos_token": "<s>", "eos_token": "</s>"})
    assert isinstance(text, str)


@fuzz(SOURCES.map(odd_template), share=8)
@example("{{ namespace(1) }}")
def test_chat_templates(source: str) -> None:
    start = time.process_time()
    refuses(lambda: render(source))
    assert time.process_time() - start < MOST_SECONDS


@fuzz(SOURCES)
def test_prompt_files(tmp_path: Path, random: Random) -> None:
    form = random.choice(("jsonl", "txt"))
    data = (change_json if form == "jsonl" else change_bytes)(LINES, random)
    (tmp_path / f"odd.{form}").write_bytes(data)
    (tmp_path / f"odd.{form}.gz").write_bytes(gzip.compress(data))
    (tmp_path / f"odd.{form}.xz").write_bytes(lzma.compress(data))
    found = {refuses(lambda path=path: read_prompts(path)) for path in tmp_path.glob(f"odd.{form}*")}
    assert len(found) == 1  # compressed or not, a file holds what it holds


@fuzz(SOURCES)
def test_compressed_files(tmp_path: Path, random: Random) -> None:
    for ending, pack in (("gz", gzip.compress), ("xz", lzma.compress)):
        path = tmp_path / f"odd.jsonl.{ending}"
        path.write_bytes(change_compressed(pack(LINES), random))
        refuses(lambda path=path: read_prompts(path))
