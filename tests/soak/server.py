"""The server under test, in a process of its own: `python -m tests.soak.server PORT [KEY]`.

Its model is tiny and random: what is tried is everything around it.
"""

import sys

import torch

from blockpilot import LLM
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.serving.listening import bind
from blockpilot.serving.running import serve
from blockpilot.serving.settings import ServeConfig
from tests.tiny import make_dflash, make_llm

MODEL = "bytes-int8"
CONTEXT_LENGTH = 512
NUM_SLOTS, MAX_QUEUE = 8, 64
MAX_BODY = 256 << 10


def make_soak_llm() -> LLM:
    settings = {"num_slots": NUM_SLOTS, "context_length": CONTEXT_LENGTH, "token_budget": 64, "reuses_prefixes": True}
    return make_llm(MODEL, drafter=make_dflash(MODEL), costs=StepCosts.linear(), **settings)


def main() -> int:
    torch.set_num_threads(1)
    port, key = int(sys.argv[1]), next(iter(sys.argv[2:]), "") or None
    config = ServeConfig(model_name="tiny", api_key=key, max_queue=MAX_QUEUE, max_body=MAX_BODY)
    with bind("127.0.0.1", port) as listener:
        serve(make_soak_llm(), config, listener, lambda line: None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
