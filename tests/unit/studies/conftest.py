"""Programs of this room are scripts: what they share lies beside them, not in the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "studies"))
