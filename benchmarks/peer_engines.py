"""The engines that `peers.py` lets answer the same prompts, behind one method: `answer(prompt_ids, max_new_tokens)`.

Each is used as its documentation shows, greedily, one request at a time. A package that is not installed, or weights
that an engine cannot read, raise `SkippedError` with one line that says so.
"""

import ctypes
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from blockpilot import LLM, SamplingParams
from blockpilot.bench.methods import Method
from blockpilot.core.config import cache_dir
from blockpilot.core.files import atomic_path, hash_file
from blockpilot.models.export import export_drafter

LOOKUP_TOKENS = 10  # the value that the documentation of transformers uses
LLAMA_LOOKUP_TOKENS = 2  # the value that the README of llama-cpp-python gives for machines without a GPU
LLAMA = "llama.cpp"
GPU_PEERS = ("transformers", "transformers-static", "dflash", "transformers-compile")  # the slowest to warm up is last
CPU_PEERS = ("transformers", "transformers-lookup", LLAMA, f"{LLAMA}-lookup", f"{LLAMA}-q4_0")


class SkippedError(Exception):
    """Why a peer does not take part."""


@dataclass(frozen=True)
class Reply:
    token_ids: list[int]
    num_first: int  # tokens that were there when the clock of decoding started
    prefill_seconds: float
    decode_seconds: float


class Contestant(Protocol):
    name: str
    about: dict[str, Any]  # versions and settings, for the manifest

    def answer(self, prompt_ids: list[int], max_new_tokens: int) -> Reply: ...


class Ours:
    """BlockPilot with one method. All that is not prefill counts as decoding, also what happens between steps."""

    def __init__(self, llm: LLM, method: Method) -> None:
        self.llm, self.name, self.pilot = llm, method.name, method.pilot
        self.about = {"pilot": method.pilot, "drafter": method.drafter}

    def answer(self, prompt_ids: list[int], max_new_tokens: int) -> Reply:
        started = time.perf_counter()
        params = SamplingParams(max_new_tokens=max_new_tokens)
        completion = self.llm.generate([prompt_ids], params, pilot=self.pilot)[0]
        prefill = completion.prefill_seconds
        return Reply(completion.token_ids, 1, prefill, time.perf_counter() - started - prefill)


@dataclass(frozen=True)
class PeerSettings:
    """What the peers are built from."""

    weights: Path  # GGUF file or Hugging Face folder of the target
    context_length: int
    num_threads: int
    eos_token_ids: tuple[int, ...]
    drafter: str = ""
    device: str = "cpu"
    dtype: str = "float32"  # of transformers


class Peers:
    """Builds peers by name; those that share a model load it once."""

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings

    def build(self, name: str) -> Contestant:
        kinds: dict[str, Callable[[], Contestant]] = {
            "transformers": lambda: self._transformers(name, {}),
            "transformers-lookup": lambda: self._transformers(name, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
            "transformers-static": lambda: self._transformers(name, {"disable_compile": True}, is_static=True),
            "transformers-compile": lambda: self._transformers(name, {}, is_static=True),
            LLAMA: lambda: LlamaCpp(name, self.settings),
            f"{LLAMA}-lookup": lambda: LlamaCpp(name, self.settings, num_drafted=LLAMA_LOOKUP_TOKENS),
            f"{LLAMA}-q4_0": lambda: LlamaCpp(name, self.settings, is_requantized=True),
            "dflash": lambda: DFlashPackage(self.settings, self._model),
        }
        return kinds[name]()

    def _transformers(self, name: str, options: dict[str, Any], *, is_static: bool = False) -> "Transformers":
        size = self.settings.context_length if is_static else None
        return Transformers(name, self._model, self.settings.eos_token_ids, options, size)

    @cached_property
    def _model(self) -> Any:
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            raise SkippedError("the package transformers is missing: pip install 'blockpilot[peers]'") from error
        logging.disable_progress_bar()
        path, options = self.settings.weights, {"dtype": getattr(torch, self.settings.dtype)}
        if path.is_file():
            path, options["gguf_file"] = path.parent, path.name
        try:
            model = AutoModelForCausalLM.from_pretrained(path, **options)
        except (ImportError, OSError, ValueError) as error:  # no gguf or accelerate, or a file it does not know
            raise SkippedError(f"transformers cannot load {self.settings.weights.name}: {error}") from error
        return model.to(self.settings.device).eval()


class TokenClock:
    """A `transformers` streamer that notes when tokens came and how many; the first call carries the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        pass


class Transformers:
    """`generate`. A static cache is kept and emptied: with one of its own `generate` records its CUDA graph anew."""

    def __init__(
        self, name: str, model: Any, eos_token_ids: Sequence[int], options: dict[str, Any], static_size: int | None
    ) -> None:
        self.name, self.model, self.eos, self.options = name, model, list(eos_token_ids), dict(options)
        self.about = {"transformers": version("transformers"), **options, "static_cache": static_size}
        if static_size is not None:  # it compiles what it decodes with by itself, on a GPU
            from transformers import StaticCache

            self.options["past_key_values"] = StaticCache(config=model.config, max_cache_len=static_size)

    def answer(self, prompt_ids: list[int], max_new_tokens: int) -> Reply:
        if "past_key_values" in self.options:
            self.options["past_key_values"].reset()
        clock = TokenClock()
        ids = torch.tensor([prompt_ids], device=self.model.device)
        started = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self.eos,
            pad_token_id=self.eos[0],
            streamer=clock,
            **self.options,
        )
        first, last = clock.times[1], clock.times[-1]
        return Reply(out[0, len(prompt_ids) :].tolist(), clock.counts[1], first - started, last - first)


class LlamaCpp:
    """llama.cpp on the same GGUF file, through the token loop of `llama-cpp-python`; other settings are its own.

    `num_drafted`: with the speculation of that package, prompt lookup. `is_requantized`: on the file in Q4_0.
    `has_all_logits`: those of every token stay in `model.scores`.
    """

    def __init__(
        self,
        name: str,
        settings: PeerSettings,
        *,
        num_drafted: int = 0,
        is_requantized: bool = False,
        has_all_logits: bool = False,
    ) -> None:
        package = import_llama_cpp()
        self.name, self.eos = name, frozenset(settings.eos_token_ids)
        options: dict[str, Any] = {"logits_all": has_all_logits}
        if num_drafted:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            # it switches all logits on by itself, but only the argument makes room for those of long prompts
            options = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=num_drafted), "logits_all": True}
        weights = requantize(settings.weights) if is_requantized else settings.weights
        self.model = open_llama(weights, settings.context_length + num_drafted, settings.num_threads, **options)
        self.about: dict[str, Any] = {
            "llama-cpp-python": package.__version__,
            "system": package.llama_print_system_info().decode(),
            "weights": weights.name,
            "num_drafted": num_drafted,
        }

    def answer(self, prompt_ids: list[int], max_new_tokens: int) -> Reply:
        self.model.reset()  # else a prefix shared with the last prompt is not computed again
        tokens: list[int] = []
        times = [time.perf_counter()]
        for token in self.model.generate(prompt_ids, temp=0.0):
            times.append(time.perf_counter())
            tokens.append(int(token))
            if token in self.eos or len(tokens) == max_new_tokens:
                break
        return Reply(tokens, 1, times[1] - times[0], times[-1] - times[1])


def import_llama_cpp() -> Any:
    """The package, which says only what went wrong."""
    try:
        import llama_cpp
    except (ImportError, OSError) as error:  # OSError: its library does not load here
        raise SkippedError("the package llama-cpp-python is missing: pip install llama-cpp-python") from error
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    return llama_cpp


def open_llama(weights: Path, context_length: int, num_threads: int, **options: Any) -> Any:
    package = import_llama_cpp()
    require_gguf(weights)
    options |= {"n_ctx": context_length, "n_threads": num_threads, "n_threads_batch": num_threads}
    try:
        return package.Llama(str(weights), n_gpu_layers=0, verbose=False, **options)
    except ValueError as error:
        raise SkippedError(f"llama.cpp cannot load {weights.name}: {error}") from error


def require_gguf(weights: Path) -> None:
    if not weights.is_file():
        raise SkippedError(f"it reads GGUF files, and the target is the folder {weights.name}")


def requantize(weights: Path) -> Path:
    """The same model in Q4_0, which llama.cpp lays out anew for speed; made once, by its own quantizer's defaults.

    From a file that is quantized already the weights are rounded twice: another model, and other text.
    """
    package = import_llama_cpp()
    require_gguf(weights)
    name = f"{weights.stem}-{hash_file(weights)[:12]}-{package.__version__}.Q4_0.gguf"
    path = cache_dir() / "peers" / name
    if path.is_file():
        return path
    params = package.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = package.LLAMA_FTYPE_MOSTLY_Q4_0, True
    with atomic_path(path) as temporary:
        if package.llama_model_quantize(str(weights).encode(), str(temporary).encode(), ctypes.byref(params)):
            raise SkippedError(f"llama.cpp cannot quantize {weights.name}")
    return path


class DFlashPackage:
    """The loop that the authors of DFlash publish (package `dflash`), with our weights, at the trained block size.

    Its drafter uses the target's whole head, ours a reduced one where the drafter has it. Needs a GPU: its clock does.
    """

    name = "dflash"

    def __init__(self, settings: PeerSettings, target: Any) -> None:
        try:
            from dflash import model as package
        except ImportError as error:
            raise SkippedError("the package dflash is missing: pip install --no-deps dflash") from error
        if settings.device == "cpu":
            raise SkippedError("it measures on a GPU only")
        with tempfile.TemporaryDirectory() as folder:
            exported = export_drafter(settings.drafter, Path(folder) / "drafter")
            kind = json.loads((exported / "config.json").read_text(encoding="utf-8"))["architectures"][0]
            drafter = getattr(package, kind).from_pretrained(exported, dtype=target.dtype)
        self.drafter, self.target = drafter.to(target.device).eval(), target
        self.generate, self.eos = package.dflash_generate, list(settings.eos_token_ids)
        self.about = {"dflash": version("dflash"), "block_size": drafter.block_size}

    def answer(self, prompt_ids: list[int], max_new_tokens: int) -> Reply:
        ids = torch.tensor([prompt_ids], device=self.target.device)
        found = self.generate(
            self.drafter, self.target, ids, max_new_tokens, self.eos, temperature=0.0, return_stats=True
        )
        tokens = found.output_ids[0, len(prompt_ids) :].tolist()
        seconds = found.time_per_output_token * found.num_output_tokens
        return Reply(tokens, 1, found.time_to_first_token, seconds)
