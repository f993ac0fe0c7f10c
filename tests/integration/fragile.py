"""What a worker makes here fails as it is told. Its own file: Ray's processes import it, and nothing heavy with it."""

import os

from blockpilot.core.errors import InputError


class Fragile:
    def work(self, what: str) -> str:
        if what == "die":
            os._exit(1)
        if what == "refuse":
            raise InputError("nothing of that name: choose another")
        if what == "fail":
            raise KeyError("lost")
        return what
