"""Prompts to judge by that nothing of ours is trained on: eight kinds of tasks, one file each.

    python recipes/make_kind_prompts.py --out DIR [--kinds recipes/everyday_kinds.json]
    blockpilot bench --split all --prompts DIR/poem.jsonl --prompts DIR/sql.jsonl ...

What they are made of stands in `unseen_kinds.json`: kinds that no task template has. `everyday_kinds.json` has kinds
that templates cover in other words. The passages of both are kept out of training text, templates and calibration.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from blockpilot.core.errors import BlockPilotError
from blockpilot.core.files import ensure_folder, read_bytes, write_text
from blockpilot.core.reading import decode_json

UNSEEN = Path(__file__).parent / "unseen_kinds.json"
NUM_OTHERS = 4  # passages around the one that is asked for


def make_prompts(source: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """By kind."""
    passages = source["passages"]
    found: dict[str, list[dict[str, str]]] = {}
    for kind, template in source["kinds"].items():
        for place, passage in enumerate(passages):
            others = [passages[(place + step) % len(passages)]["text"] for step in range(-1, NUM_OTHERS)]
            text = template.format(**passage, others="\n\n".join(others))
            found.setdefault(kind, []).append({"id": f"{kind}-{place}", "prompt": text})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--kinds", type=Path, default=UNSEEN, metavar="FILE")
    arguments = parser.parse_args()
    out, kinds = arguments.out, arguments.kinds
    try:
        ensure_folder(out)
        for kind, prompts in make_prompts(decode_json(read_bytes(kinds), dict[str, Any], str(kinds))).items():
            write_text(out / f"{kind}.jsonl", "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in prompts))
    except BlockPilotError as error:
        print(f"make_kind_prompts.py: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
