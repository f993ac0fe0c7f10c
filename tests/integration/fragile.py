"""A worker that fails as it is told. Its own file: Ray's processes import it, and nothing heavy with it."""

import os

from blockpilot.core.errors import InputError
from blockpilot.integrations.ray.cluster import Worker


class Fragile(Worker):
    def work(self, what: str) -> str:
        if what == "die":
            os._exit(1)
        if what == "refuse":
            raise InputError("nothing of that name: choose another")
        if what == "fail":
            raise KeyError("lost")
        return what
