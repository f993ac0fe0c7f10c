"""`python -m blockpilot` is the same as `blockpilot`."""

import sys

from blockpilot.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
