"""The entry point in vLLM's plugin group `vllm.general_plugins`.

vLLM calls `register` in its front end, in the engine's core and in every worker, perhaps more than once. It hooks the
constructors of vLLM's classes. What they build looks for settings in its own configuration, and without any stays as
vLLM made it. A failure of ours never stops vLLM: it is logged, and the object stays as it was.
"""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from blockpilot.core.config import chosen_pilot
from blockpilot.core.errors import BlockPilotError
from blockpilot.integrations.vllm.settings import SUPPORTED, is_supported, logger, read_pilot

if TYPE_CHECKING:
    from blockpilot.integrations.vllm.steering import Steering

MARK = "_blockpilot_attach"


def register() -> None:
    from vllm.version import __version__ as version

    if not is_supported(version):
        if chosen_pilot():
            first, last = (".".join(map(str, numbers)) for numbers in SUPPORTED)
            logger.warning(
                "BlockPilot stays off: it supports vLLM >=%s,<%s, and this is %s. vLLM drafts as configured.",
                first,
                last,
                version,
            )
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    hook_constructor(GPUModelRunner, attach_runner)
    hook_constructor(Scheduler, attach_scheduler)
    hook_constructor(PrometheusStatLogger, attach_counters)


def hook_constructor(owner: type, attach: Callable[[Any, str], None]) -> None:
    """Call `attach` with every new object of a class whose engine has a pilot. Hooking twice changes nothing."""
    original = owner.__init__  # type: ignore[misc]
    if getattr(original, MARK, None) is not None:
        return

    @wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            pilot = read_pilot(self.vllm_config)
            if pilot is not None:
                attach(self, pilot)
        except Exception as error:
            is_foreseen = isinstance(error, BlockPilotError)
            logger.error("BlockPilot stays off in %s: %s", type(self).__name__, error, exc_info=not is_foreseen)

    setattr(construct, MARK, attach)
    owner.__init__ = construct  # type: ignore[misc]


def attach_runner(runner: Any, pilot: str) -> None:
    from blockpilot.integrations.vllm.runner import PilotedRunner

    if not reason_to_stay_off(runner.vllm_config) and hasattr(runner, "drafter"):  # only the last pipeline stage drafts
        PilotedRunner(runner, make_steering(runner.vllm_config, pilot))


def attach_scheduler(scheduler: Any, pilot: str) -> None:
    """Every engine has one scheduler, whatever its model runner is: here it is said why a pilot stays off."""
    if reason := reason_to_stay_off(scheduler.vllm_config):
        logger.warning("BlockPilot stays off: %s.", reason)
        return
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from blockpilot.integrations.vllm.counters import PlainSteps

    PlainSteps(scheduler, SpecDecodingStats.new)


def attach_counters(stat_logger: Any, pilot: str) -> None:
    from blockpilot.integrations.vllm.counters import PilotCounters

    if not reason_to_stay_off(stat_logger.vllm_config):
        PilotCounters(stat_logger, stat_logger.vllm_config.speculative_config.num_speculative_tokens)


def reason_to_stay_off(config: Any) -> str | None:
    speculative = config.speculative_config
    if speculative is None or speculative.method != "dflash":
        return "it pilots DFlash drafters, and this engine has none (speculative-config with method dflash)"
    if config.use_v2_model_runner:
        return "it does not support the V2 model runner yet: set VLLM_USE_V2_MODEL_RUNNER=0"
    if config.scheduler_config.async_scheduling:
        return "it does not support asynchronous scheduling yet: add --no-async-scheduling"
    return None


def make_steering(config: Any, pilot: str) -> "Steering":
    from blockpilot.integrations.vllm.costs import engine_key, find_costs
    from blockpilot.integrations.vllm.pilot_choice import PilotChoice
    from blockpilot.integrations.vllm.steering import Steering

    speculative = config.speculative_config
    num_draft_tokens = int(speculative.num_speculative_tokens)
    trained = getattr(speculative.draft_model_config.hf_config, "block_size", None) or num_draft_tokens + 1
    target, drafter = config.model_config.model, speculative.model
    choice = PilotChoice(pilot, target=target, drafter=drafter, costs=lambda: find_costs(engine_key(config)))
    logger.info("BlockPilot is on: pilot %s, up to %d drafted tokens.", pilot, num_draft_tokens)
    return Steering(choice, num_draft_tokens=num_draft_tokens, trained_block_size=int(trained))
