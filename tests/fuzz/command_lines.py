"""Bad command lines out of good ones: what an option is given, what files hold, and words that are missing."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from blockpilot.cli.main import build_parser
from tests.fuzz.damage import damage_file
from tests.fuzz.world import JUDGED, NETWORK, PAIR, RUN, SHORT

_LOADED = (*PAIR, "--profile", "profile.json")
_BENCH = ("bench", "--prompts", "more.txt", *PAIR, *SHORT, "--num-prompts", "1")
_COLLECT = ("collect", "--prompts", "quiz.jsonl", *PAIR, *SHORT, "--sizes", "2-4,8")
_SYNTHESIZE = ("synthesize", "--target", "target", "--num-prompts", "16", "--max-length", "48")
_PILOT = ("train-pilot", *JUDGED)
GOOD: dict[str, tuple[tuple[str, ...], ...]] = {  # in the folder of `make_world`; some go on with a run
    "generate": (
        ("generate", "what is 3", *_LOADED, *SHORT),
        ("generate", "what is 3", *_LOADED, *SHORT, "--pilot", "pilot", "--temperature", "1", "--json"),
        ("generate", "what is 3", *_LOADED, *SHORT, "--pilot", "prefill:prefill", "--raw"),
        ("generate", "what is 3", "--target", "tiny.gguf", "--drafter", "ngram", "--pilot", "fixed:4", *SHORT),
        ("generate", "abc", "--target", "target", "--drafter", "eagle3", "--pilot", "tree:5", *SHORT),
        ("generate", "abc", "--target", "exported", "--drafter", "first", "--pilot", "fixed:4", *SHORT),
    ),
    "profile": (("profile", *PAIR, "--quick", "--contexts", "64"),),
    "synthesize": (
        (*_SYNTHESIZE, "--out", "new"),
        (*_SYNTHESIZE, "--out", "texts"),
        (*_SYNTHESIZE, "--out", "new", "--prompts", "quiz.jsonl", "--exclude", "xs.txt.xz"),
    ),
    "train-drafter": (
        ("train-drafter", "--target", "target", "--data", "texts", "--out", "new", *RUN),
        ("train-drafter", "--target", "target", "--data", "texts", "--out", "checkpoints", *RUN),
        ("train-drafter", "--target", "target", "--data", "texts", "--out", "new", *RUN, "--kind", "eagle3"),
    ),
    "collect": (
        (*_COLLECT, "--out", "new"),
        (*_COLLECT, "--out", "traces"),
        ("collect", "--prompts", "small.jsonl.gz", "xs.txt.xz", "--out", "new", *PAIR, *SHORT, "--sizes", "2-4,8"),
    ),
    "train-pilot": (
        (*_PILOT, "--out", "new"),
        (*_PILOT, "--out", "pilot", "--profile", "profile.json"),
        (*_PILOT, "--out", "prefill", "--kind", "prefill", "--sizes", "2,4,8", *NETWORK),
    ),
    "bench": (
        (*_BENCH, "--methods", "ar,ngram", "--out", "new"),
        (*_BENCH, "--methods", "ar,auto", "--profile", "profile.json", "--out", "new"),
        (*_BENCH[:-1], "2", "--methods", "ar,ngram", "--out", "run"),
        (*_BENCH, "--methods", "ar,ngram", "--out", "new", "--reference", "run"),
        (*_BENCH, "--methods", "ar,blockpilot", "--pilot-file", "prefill", "--out", "new"),
        (*_BENCH, "--dry-run"),
    ),
    "report": (("report", "whole", "--out", "new"), ("report", "run"), ("report", "whole", "run", "--json")),
    "load-test": (
        ("load-test", "--prompts", "quiz.jsonl", "--rate", "5", "--num-requests", "2", "--url", "http://127.0.0.1:9"),
        ("load-test", "--prompts", "more.txt", "--concurrency", "2", "--model", "x", "--out", "new/result.json"),
    ),
    "probe": (("probe", "--target", "tiny.gguf", "--batch-size", "2"),),
    "models": (
        ("models", "export", "target", "--out", "new"),
        ("models", "export", "tiny.gguf", "--out", "exported"),
        ("models", "list"),
        ("models", "fetch", "smollm2-135m-dflash2"),
        ("models", "verify", "smollm2-135m-dflash2"),
    ),
}
_WEIGHTS = {"generate": 6, "profile": 1, "probe": 1, "models": 2, "report": 3, "bench": 4}  # of drawing a verb; else 3
_NUMBERS = (
    *("0", "-1", "1", "2", "3", "63", "64", "65", "1e3", "1.5", "nan", "-inf", "inf", "1e400", "1e-400", "0x10", ""),
    *(str(2**31 - 1), str(2**31), str(2**63), str(2**64), str(10**30), "9" * 5000, " 1", "1_0", "\u0663", "one"),
)
_LISTS = (
    *("1,2,3", ",", "1,,2", "0", "2-", "64-2", "-5--1", "1-999999999", "nan", "2,2,2", "a,b", "1," * 3000, "9" * 400),
    *("1e5", "4096,4096", "2-64", "1,1,1", "0,1,2", "-1,0", "inf,0", "1e-9"),
)
_TEXTS = (
    *("", " ", "-", "--", "x", "x" * 300, "y" * 5000, "a\nb", "a\x1b[2J", "\udcff", "\u202e", "~", "~no-one/x", "*"),
    *("{}", "[]", '{"a": 1}', "[" * 5000, "none", "auto", "ngram", "int8", "q8_0", "cuda", "cuda:99", "cpu:0", "mps"),
    *("ar", "step", "fixed:8", "fixed:65", "fixed:", "tree:200", "tree:4@9", "tree:@", "prefill:", "prefill:gone"),
    *("chain-step", "ar,dflash:4", "dflash:0", "eagle3-tree", "blockpilot", "ngram,ngram", "gsm8k", "mt_bench", "muon"),
    *("smollm2-135m", "smollm2-135m-dflash2", "org/name", "org/" + "n" * 500, "../x/y", "bfloat16", "float16", "::"),
    *("eagle3", "dflash2", "visited", "host:99999", "float32", "best-fixed,auto", "tree:4,tree:4", "prefill:pilot"),
)
_PLACES = (
    *("gone", "gone/deep/er", "/dev/null", "/dev/zero", "/dev/full", "/dev/null/x", "/proc/self/mem", "/proc/1/x", "."),
    *("..", "", "n" * 300, "d/" * 3000, "quiz.jsonl/x", "\x00", "a\x00b", "two words", "/proc/self/fd/0"),
)


@dataclass
class Case:
    """A command line, and what was done before it is run."""

    words: list[str]
    deeds: list[str] = field(default_factory=list)


def draw_case(folder: Path, random: Random) -> Case:
    """Spoil a good command line in the copy of the world that `folder` is: one or two words or files."""
    verbs = list(GOOD)
    verb = random.choices(verbs, [_WEIGHTS.get(name, 3) for name in verbs])[0]
    case = Case(list(random.choice(GOOD[verb])))
    for _ in range(random.choice((1, 1, 2, 3))):
        way = random.choices((_spoil_option, _spoil_file, _spoil_word), (5, 6, 1))[0]
        way(case, folder, random)
    return case


def _spoil_option(case: Case, folder: Path, random: Random) -> None:
    """Give any option of the verb any value; the last one counts."""
    actions = [one for one in _find_options(case.words) if one.dest not in ("help", "debug")]
    if not actions:  # the verb was left out before
        return
    action = random.choice(actions)
    name = action.option_strings[-1] if action.option_strings else ""
    if action.nargs == 0:
        case.words.append(name)
        return
    value = _odd_value(action, folder, random)
    if not name:
        place = random.randrange(1, len(case.words))
        case.words[place] = value
    elif random.random() < 0.5:
        case.words.append(f"{name}={value}")
    else:
        case.words += [name, value]


def _find_options(words: list[str]) -> list[argparse.Action]:
    """Of the verb, and of what it is asked to do where there is more than one thing."""
    actions, found = build_parser(words)._actions, []
    for word in words:
        for action in actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                actions = action.choices[word]._actions
                found += [one for one in actions if not isinstance(one, argparse._SubParsersAction)]
                break
    return found


def _odd_value(action: argparse.Action, folder: Path, random: Random) -> str:
    paths = (*_PLACES, *(str(path.relative_to(folder)) for path in folder.iterdir()))
    near = _NUMBERS if action.type in (int, float) else paths if action.type is Path else _TEXTS
    if isinstance(action.metavar, str) and "," in action.metavar:
        near = _LISTS
    if action.metavar in ("MODEL", "PATH", "DIR", "FILE"):
        near = (*paths, *_TEXTS)
    return random.choice(near if random.random() < 0.8 else (*_NUMBERS, *_LISTS, *_TEXTS, *paths))


def _spoil_file(case: Case, folder: Path, random: Random) -> None:
    """Change a file that the command line names, directly or by its folder."""
    named = [folder / word.removeprefix("prefill:") for word in case.words if 0 < len(word) < 100 and "\0" not in word]
    named = [path for path in named if path.exists() and folder in path.parents]
    named += [folder / "cache"] if random.random() < 0.1 else []
    if named and (files := _files_below(random.choice(named))):
        case.deeds.append(damage_file(random.choice(files), _files_below(folder), random))


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(
        Path(place, name) for place, _, names in os.walk(path) for name in names if Path(place, name).is_file()
    )


def _spoil_word(case: Case, folder: Path, random: Random) -> None:
    """Leave a word out, say one twice, put one in or exchange two."""
    words, place = case.words, random.randrange(max(1, len(case.words)))
    way = random.randrange(4)
    if way == 0 or len(words) < 2:
        del words[place : place + 1]
    elif way == 1:
        words.insert(place, words[place])
    elif way == 2:
        words.insert(place, random.choice((*_TEXTS, *_NUMBERS, "--help", "--version", "--unknown")))
    else:
        other = random.randrange(len(words))
        words[place], words[other] = words[other], words[place]
