"""Good inputs for every verb, made on the fly: a tiny pair of models, and what each verb writes with them.

Whatever is fuzzed begins as one of these, so that a change of one place is what decides.
"""

import contextlib
import gzip
import json
import lzma
import os
import random
import struct
import sys
from pathlib import Path

from blockpilot.cli.main import main
from blockpilot.core.config import cache_dir
from blockpilot.models.loading import save_drafter
from tests.tiny import make_dflash, make_eagle3
from tests.unit.models.hostile import gguf_bytes, model_fields, number, tensor
from tests.unit.report.hostile import write_whole
from tests.unit.training.pieces import save_target

HIDDEN, INNER, LAYERS, WORDS = 64, 96, 2, 265
_SHAPES = {  # of a layer's tensors, as GGUF files order them
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN // 2),
    "attn_v": (HIDDEN, HIDDEN // 2),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (HIDDEN, INNER),
    "ffn_up": (HIDDEN, INNER),
    "ffn_down": (INNER, HIDDEN),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}
_BLOCK = 32  # of Q8_0: a scale of two bytes, and a byte for each number
_Q8_0, _F32 = 8, 0
PAIR = ("--target", "target", "--drafter", "drafter")
SHORT = ("--max-new-tokens", "16")
SHAPE = ("--layers", "1", "--block-size", "4", "--taps", "0,2", "--unrolled", "2", "--blocks", "2")
RUN = (*SHAPE, "--steps", "2", "--batch-size", "2", "--width", "48", "--checkpoint-every", "1")
JUDGED = ("--traces", "traces", "--held-out", "others")
NETWORK = ("--hidden-size", "8", "--epochs", "2")
_MADE_BY = (  # command lines that make the rest, in this order
    ("profile", *PAIR, "--quick", "--contexts", "64"),
    ("synthesize", "--target", "target", "--out", "texts", "--num-prompts", "16", "--max-length", "48"),
    ("train-drafter", "--target", "target", "--data", "texts", "--out", "checkpoints", *RUN),
    ("collect", "--prompts", "quiz.jsonl", "--out", "traces", *PAIR, *SHORT, "--sizes", "2-4,8"),
    ("collect", "--prompts", "more.txt", "--out", "others", *PAIR, *SHORT, "--sizes", "2-4,8"),
    ("train-pilot", *JUDGED, "--out", "pilot"),
    ("train-pilot", *JUDGED, "--out", "prefill", "--kind", "prefill", "--sizes", "2,4,8", *NETWORK),
    ("bench", "--prompts", "more.txt", *PAIR, *SHORT, "--methods", "ar,ngram", "--num-prompts", "2", "--out", "run"),
    ("models", "export", "target", "--out", "exported"),
)


def make_world(folder: Path) -> None:
    """Everything in a new folder. Runs real verbs, so it takes a few seconds."""
    folder.mkdir(parents=True)
    save_target(folder / "target")
    save_drafter(make_dflash(is_second=True), folder / "drafter")
    save_drafter(make_dflash(), folder / "first")
    save_drafter(make_eagle3(), folder / "eagle3")
    (folder / "tiny.gguf").write_bytes(good_gguf())
    _write_prompts(folder)
    write_whole(folder / "whole")
    with contextlib.chdir(folder), contextlib.redirect_stdout(sys.stderr):
        for words in _MADE_BY:
            if main(words) != 0:
                raise RuntimeError(f"a good command line fails: {' '.join(words)}")
        profile = next((cache_dir() / "profiles").glob("target-*.json"))
        os.link(profile, "profile.json")


def good_gguf() -> bytes:
    """A target in Q8_0 that runs in int8."""
    sizes = {"embedding_length": HIDDEN, "feed_forward_length": INNER, "block_count": LAYERS}
    fields = model_fields() | {f"llama.{key}": number(f"llama.{key}", "u32", size) for key, size in sizes.items()}
    shapes = {"token_embd": (HIDDEN, WORDS), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in _SHAPES.items()}
    entries, data, source = [], b"", random.Random(0)
    for name, shape in shapes.items():
        entries.append(tensor(f"{name}.weight", shape, _Q8_0 if len(shape) > 1 else _F32, len(data)))
        part = _weights(shape, source)
        data += part + bytes(-len(part) % _BLOCK)
    return gguf_bytes(list(fields.values()), entries, data=data)


def _weights(shape: tuple[int, ...], source: random.Random) -> bytes:
    if len(shape) == 1:
        return struct.pack(f"<{shape[0]}f", *[1.0] * shape[0])
    return b"".join(struct.pack("<e", 0.01) + source.randbytes(_BLOCK) for _ in range(shape[0] * shape[1] // _BLOCK))


def _write_prompts(folder: Path) -> None:
    lines = [json.dumps({"id": f"q{place}", "prompt": f"what is {place}", "answer": "4"}) for place in range(16)]
    quiz, more = "\n".join(lines).encode(), b"one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n"
    files = {
        "quiz.jsonl": quiz,
        "more.txt": more,
        "small.jsonl.gz": gzip.compress(quiz),
        "xs.txt.xz": lzma.compress(more),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
