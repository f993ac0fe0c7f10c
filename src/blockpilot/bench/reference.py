"""The plain answers of an earlier run, to compare other batches and prompt cuts with.

`bench --reference DIR` counts differences from these and not from the run's own plain answers. So batches, and prompts
read in pieces, are held against plain decoding with one request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from blockpilot.bench.answers import Answer, AnswersFile, plain_answers
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.errors import InputError
from blockpilot.core.files import hash_file
from blockpilot.core.manifests import MANIFEST, MAX_BYTES, RESULTS, find_differing, require_content
from blockpilot.core.reading import convert, read_json

_ARGUMENTS = ("max_new_tokens", "temperature", "seed")
_SOURCE = ("file", "sha256", "num_prompts", "ids_sha256")


class _Manifest(TypedDict):
    """What a comparison needs of the manifest."""

    id: Annotated[str, msgspec.Meta(max_length=200)]
    arguments: dict[str, Any]
    prompts: NotRequired[dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Reference:
    folder: Path
    manifest: Mapping[str, Any]
    plain: tuple[Answer, ...]
    sha256: str  # of its answers

    def describe(self) -> dict[str, str]:
        """What the manifest of a run that is compared with it says."""
        return {"folder": self.folder.resolve().name, "manifest": self.manifest["id"], "sha256": self.sha256}

    def require_match(self, run: Mapping[str, Any], tasks: tuple[TaskPrompts, ...]) -> None:
        """Refuse it for a run (as `describe_run` tells of it) whose plain answers could be others."""
        names = [task.name for task in tasks]
        theirs, ours = _identity(self.manifest, names), _identity(run, names)
        if differing := find_differing(theirs, ours):
            key, (there, here) = next(iter(differing.items()))
            raise InputError(
                f"--reference {self.folder} is of another run: {key} is {there!r:.80} there and {here!r:.80} here"
            )
        known = {(answer.task, answer.prompt_id, answer.turn) for answer in self.plain}
        for task in tasks:
            for prompt in task.prompts:
                if any((task.name, prompt.id, turn) not in known for turn in range(len(prompt.turns))):
                    raise InputError(
                        f"--reference {self.folder} lacks the plain answer to {prompt.id} of task {task.name}: "
                        "finish that run first"
                    )


def read_reference(folder: Path) -> Reference:
    """The run in a folder, which must have answered one request at a time."""
    require_content(folder, RESULTS)
    manifest = read_json(folder / MANIFEST, most=MAX_BYTES)
    if manifest is None or "arguments" not in manifest or "id" not in manifest:
        raise InputError(f"--reference {folder} holds no benchmark run: give the --out of one")
    convert(manifest, _Manifest, str(folder / MANIFEST), "give the --out of another run")
    if (many := manifest["arguments"].get("concurrency")) != 1:
        raise InputError(f"--reference {folder} was measured with --concurrency {many!r:.20}: give a run with 1")
    path = folder / "answers.jsonl"
    plain = plain_answers(AnswersFile(path).answers)
    if not plain:
        raise InputError(f"--reference {folder} has no answers of ar in answers.jsonl: finish that run first")
    return Reference(folder, manifest, tuple(plain), hash_file(path))


def _identity(run: Mapping[str, Any], tasks: list[str]) -> dict[str, Any]:
    """Everything that plain answers to these tasks depend on, as far as a manifest knows."""
    arguments, prompts = run["arguments"], run.get("prompts", {})
    sources = {task: prompts.get(task, {}) for task in tasks}
    return {
        **{name: run.get(name) for name in ("target", "device", "dtype", "near_tie_gap")},
        "arguments": {name: arguments.get(name) for name in _ARGUMENTS},
        "prompts": {task: {name: source.get(name) for name in _SOURCE} for task, source in sources.items()},
    }
