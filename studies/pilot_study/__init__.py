"""The arithmetic behind `released_sweeps.py` and `pilot_experiments.py`: choosing a block size once per request."""
