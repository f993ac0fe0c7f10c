"""Where verbs run under faults: tiny models, prompts, texts and traces made once; every run in a folder of its own."""

import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

from blockpilot.cli.main import VERBS as MODULES
from blockpilot.cli.main import build_parser
from blockpilot.core.errors import BlockPilotError
from blockpilot.models.dflash_format import save_dflash
from tests.faults.disk import FaultyDisk
from tests.faults.results import read_results
from tests.tiny import make_dflash
from tests.unit.training.pieces import save_target

_SYNTHESIS = ["--num-prompts", "24", "--max-length", "48", "--rows", "8", "--temperatures", "0", "--shard-size", "2"]
_SHAPE = ["--layers", "1", "--block-size", "4", "--taps", "0,2", "--blocks", "4", "--batch-size", "4", "--width", "48"]
_STEPS = ["--steps", "4", "--checkpoint-every", "1", "--evaluate-every", "2"]
_TRACES = ["--sizes", "2-4", "--draft-sizes", "4", "--max-new-tokens", "8", "--shard-size", "4"]
_ANSWERS = ["--max-new-tokens", "6", "--num-prompts", "2", "--methods", "dflash:3,ngram"]
VERBS = ("synthesize", "train-drafter", "collect", "train-pilot", "bench")


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_target(folder / "target")
        save_dflash(make_dflash(is_second=True), folder / "drafter")
        lines = [json.dumps({"id": f"q{place}", "prompt": f"what is {place}"}) for place in range(12)]
        (folder / "quiz.jsonl").write_text("\n".join(lines), encoding="utf-8")
        self.operations: dict[str, list[tuple[str, Path]]] = {}  # of a run that nothing disturbs
        self.results: dict[str, dict[str, Any]] = {}
        for verb in VERBS:
            with FaultyDisk() as disk:
                assert self.run(verb, self.undisturbed(verb)) is None
            assert disk.unsafe == 0, f"a power cut takes something of {verb} that has ended well"
            self.operations[verb] = disk.operations
            self.results[verb] = read_results(self.undisturbed(verb))

    def undisturbed(self, verb: str) -> Path:
        return self.folder / "undisturbed" / verb

    def run(self, verb: str, out: Path) -> BlockPilotError | None:
        """A command, as far as it comes; the error that it ends with on purpose."""
        words = [verb, "--out", str(out), *self._words(verb)]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                assert importlib.import_module(MODULES[verb][0]).run(build_parser(words).parse_args(words)) == 0
            except BlockPilotError as error:
                return error
        return None

    def _words(self, verb: str) -> list[str]:
        target, prompts = ["--target", str(self.folder / "target")], ["--prompts", str(self.folder / "quiz.jsonl")]
        pair = [*target, "--drafter", str(self.folder / "drafter")]
        return {
            "synthesize": [*target, *_SYNTHESIS],
            "train-drafter": [*target, "--data", str(self.undisturbed("synthesize")), *_SHAPE, *_STEPS],
            "collect": [*pair, *prompts, *_TRACES],
            "train-pilot": ["--traces", str(self.undisturbed("collect"))],
            "bench": [*pair, *prompts, *_ANSWERS],
        }[verb]
