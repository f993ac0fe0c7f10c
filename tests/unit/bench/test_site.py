"""One target, several engines around it."""

from pathlib import Path

import pytest

from blockpilot import EngineConfig, SamplingParams
from blockpilot.bench.methods import parse_methods
from blockpilot.bench.site import build_llms
from blockpilot.core.errors import InputError
from blockpilot.models.dflash_format import save_dflash
from tests.tiny import make_dflash, make_eagle3
from tests.unit.training.pieces import chat_target


@pytest.mark.parametrize("backend", ["auto", "mkldnn", "plain"])
def test_engines_share_a_packed_target_and_agree(backend: str) -> None:
    drafters = {"dflash": make_dflash(is_second=True), "eagle3": make_eagle3(), "ngram": "ngram"}
    llms = build_llms(chat_target(), drafters, EngineConfig(num_slots=1, linear_backend=backend))
    assert len({id(llm.engine.runner.decoder) for llm in llms.values()}) == 1 and len(llms) == 4
    names = ["dflash:4", "eagle3:3", "ngram", "tree:5"]
    params = SamplingParams(max_new_tokens=12)
    methods = parse_methods(names, device="cpu", target="tiny")
    answers = [llms[method.drafter].generate("what is", params, pilot=method.pilot).token_ids for method in methods]
    assert all(answer == answers[0] for answer in answers)


def test_a_drafter_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    save_dflash(make_dflash(), tmp_path / "drafter")
    with pytest.raises(InputError, match=r"--eagle3 .*drafter is no eagle3 drafter"):
        build_llms(chat_target(), {"eagle3": str(tmp_path / "drafter")}, EngineConfig(linear_backend="plain"))
