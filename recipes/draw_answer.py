"""Draws an answer, its tokens coloured by step, with plain decoding beside it: the README's picture.

    python recipes/draw_answer.py --out docs/figures/answer.svg
    blockpilot generate PROMPT --json > answer.json; python recipes/draw_answer.py --answer answer.json --out answer.svg

Decoding is lossless, so both panels hold the same tokens: with a drafter a step adds several, plainly it adds one. The
SVG has no scripts and fetches nothing; its colours follow the reader's light or dark theme.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

PROMPT = "Write a Python function that counts the vowels in a string."
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # Okabe and Ito; neighbours are told apart
FIRST = "#8c8c8c"  # of the token that prefill brings
COLUMNS = 59  # characters of a line
CELL, LINE, SIZE = 7.2, 19, 12  # width of a character, height of a line, height of letters
MARGIN, GAP, TOP, BOTTOM = 18, 26, 54, 44
STYLE = """
svg{background:#fff}.card{fill:#fff}.ink{fill:#1f2328}.faint{fill:#59636e}.own{fill-opacity:.38;stroke-width:1.5}
.drafted{fill-opacity:.2;stroke:none}
@media(prefers-color-scheme:dark){svg{background:#0d1117}.card{fill:#0d1117}.ink{fill:#f0f6fc}.faint{fill:#9198a1}
.own{fill-opacity:.6}.drafted{fill-opacity:.34}}
text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.title{font:600 14px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.note{font:12px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
"""


class Token(NamedTuple):
    text: str
    step: int  # 0: the first token, which comes out of prefill
    is_drafted: bool  # whether it was drafted and accepted; else it is the target's own


class Cell(NamedTuple):
    letter: str
    place: int  # of its token in the answer


def mark_steps(texts: Sequence[str], emitted: Sequence[int]) -> list[Token]:
    """The last token of a step is the target's own, all before it were drafted."""
    tokens = [Token(texts[0], 0, is_drafted=False)]
    for step, count in enumerate(emitted, start=1):
        place = len(tokens)
        tokens += [Token(texts[place + i], step, is_drafted=i < count - 1) for i in range(count)]
    return tokens


def split_lines(tokens: Sequence[Token], columns: int = COLUMNS) -> list[list[Cell]]:
    """Lines of at most so many letters, broken between words: a space that would begin a line is left out.

    A line break is a blank letter of its token.
    """
    lines: list[list[Cell]] = [[]]
    cells = [Cell(letter, place) for place, token in enumerate(tokens) for letter in token.text]
    for letter, place in cells:
        if letter == "\n":
            lines[-1].append(Cell(" ", place))
            lines.append([])
            continue
        lines[-1].append(Cell(letter, place))
        if len(lines[-1]) > columns:
            spaces = [i for i, cell in enumerate(lines[-1]) if cell.letter == " "]
            cut = spaces[-1] if spaces else columns
            lines[-1], rest = lines[-1][:cut], lines[-1][cut:]
            lines.append(rest[1:] if spaces else rest)
    return lines


def draw_panel(tokens: Sequence[Token], left: float, title: str, note: str) -> Iterator[str]:
    yield f'<text class="title ink" x="{left:g}" y="24">{escape(title)}</text>'
    yield f'<text class="note faint" x="{left:g}" y="42">{escape(note)}</text>'
    for number, line in enumerate(split_lines(tokens)):
        top, column = TOP + number * LINE, 0
        for place, cells in groupby(line, key=lambda cell: cell.place):
            width = len(list(cells))
            yield draw_box(tokens[place], left + column * CELL, top, width * CELL)
            column += width
        letters = "".join(cell.letter for cell in line).rstrip()
        if text := letters.lstrip():
            x = left + (len(letters) - len(text)) * CELL
            size = f'x="{x:g}" y="{top + 13}" textLength="{len(text) * CELL:g}" font-size="{SIZE}"'
            yield f'<text class="ink" {size}>{escape(text, quote=False)}</text>'


def draw_box(token: Token, x: float, y: float, width: float) -> str:
    colour = COLOURS[(token.step - 1) % len(COLOURS)] if token.step else FIRST
    kind = "drafted" if token.is_drafted else "own"
    inset = 0 if token.is_drafted else 1
    place = f'x="{x + inset:g}" y="{y + inset}" width="{width - 2 * inset:g}" height="{17 - 2 * inset}"'
    return f'<rect class="{kind}" {place} fill="{colour}" stroke="{colour}"/>'


def draw_legend(y: float) -> Iterator[str]:
    x = float(MARGIN)
    for step, is_drafted, words in (
        (1, True, "drafted and accepted"),
        (1, False, "the target's own token, one per step"),
        (0, False, "first token, from prefill"),
    ):
        yield draw_box(Token("", step, is_drafted), x, y - 13, 26)
        yield f'<text class="note ink" x="{x + 33:g}" y="{y:g}">{escape(words)}</text>'
        x += 56 + 6.4 * len(words)
    yield f'<text class="note ink" x="{x:g}" y="{y:g}">one colour: one step</text>'


def draw(texts: Sequence[str], emitted: Sequence[int], source: str) -> str:
    """The whole picture. `texts` are those of the answer's tokens, `emitted` the tokens of each step."""
    drafted, plain = mark_steps(texts, emitted), mark_steps(texts, [1] * (len(texts) - 1))
    second = MARGIN + COLUMNS * CELL + GAP
    width = second + COLUMNS * CELL + MARGIN
    height = TOP + len(split_lines(drafted)) * LINE + BOTTOM
    rate = sum(emitted) / len(emitted)
    alone = f"the same {len(texts)} tokens, one at a time"
    parts = [
        f'<rect class="card" width="{width:g}" height="{height}"/>',
        *draw_panel(drafted, MARGIN, f"BlockPilot: {len(emitted)} steps", f"{source}, {rate:.1f} tokens per step"),
        *draw_panel(plain, second, f"Plain decoding: {len(texts) - 1} steps", alone),
        *draw_legend(height - 16),
    ]
    label = f"An answer of {len(texts)} tokens in {len(emitted)} steps; plain decoding takes {len(texts) - 1}"
    box = f'viewBox="0 0 {width:g} {height}" xml:space="preserve"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def token_texts(token_ids: Sequence[int], target: str) -> list[str]:
    """Of all tokens; special ones are empty. A letter of several tokens belongs to its last."""
    import torch

    from blockpilot.models.loading import load_target

    tokenizer = load_target(target, torch.float32).tokenizer
    so_far = [tokenizer.decode(token_ids[:end]).rstrip("\ufffd") for end in range(len(token_ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(so_far)]


def generate(prompt: str) -> dict[str, Any]:
    from blockpilot import LLM, SamplingParams

    found = LLM().generate(prompt, SamplingParams(max_new_tokens=256))
    emitted = [step.emitted for step in found.steps]
    return {"token_ids": found.token_ids, "emitted": emitted, "target": "smollm2-135m", "pilot": "auto"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--answer", type=Path, metavar="FILE", help="of `blockpilot generate --json`, not a new one")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    answer = json.loads(arguments.answer.read_text()) if arguments.answer else generate(arguments.prompt)
    texts = token_texts(answer["token_ids"], answer["target"])
    arguments.out.write_text(draw(texts, answer["emitted"], f"{answer['target']}, pilot {answer['pilot']}"))


if __name__ == "__main__":
    main()
