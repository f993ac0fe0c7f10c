"""For tests that draw examples."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # a machine that does other work fails no test
settings.load_profile("untimed")
