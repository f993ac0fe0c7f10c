"""`blockpilot collect --ray`: every worker traces whole shards, the process that leads writes them."""

from pathlib import Path
from typing import Any

from blockpilot.core.files import write_bytes
from blockpilot.core.progress import Report
from blockpilot.engine.llm import LLM
from blockpilot.integrations.ray.cluster import ClusterOptions, Pool, open_cluster
from blockpilot.replay.collect import Shards, describe_run, encode_requests
from blockpilot.replay.collector import Collector
from blockpilot.replay.config import CollectJob
from blockpilot.replay.trace_files import TraceSet, pack_shard, shard_path


class CollectWorker:
    """The models of one worker."""

    def __init__(self, job: CollectJob) -> None:
        llm = LLM(job.target, drafter=job.drafter, pilot="ar", config=job.engine)
        self.job = job
        self.collector = Collector(llm, encode_requests(llm, job.prompts, job.config.seed), job.config)

    def describe(self) -> dict[str, Any]:
        return describe_run(self.collector, self.job.source)

    def trace(self, index: int) -> bytes:
        """A shard as it shall stand in its file."""
        return pack_shard(list(self.collector.trace(index)), self.job.config.precision)


def collect_on_ray(job: CollectJob, options: ClusterOptions, *, out: Path, report: Report) -> TraceSet:
    """`collect` on a cluster: the same files, whichever worker made them."""
    with open_cluster(options) as placements, Pool(CollectWorker, placements, job) as pool:
        shards = Shards(out, pool.ask("describe"), report)
        for place, content in pool.run("trace", [(index,) for index in shards.missing]):
            index = shards.missing[place]
            write_bytes(shard_path(out, index), content)
            shards.progress.advance("traces", shards.count(index))
        return shards.finish()
