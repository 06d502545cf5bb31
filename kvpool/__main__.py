"""python -m kvpool, the same as the `kvpool` command."""

import sys

from kvpool.cli import main

if __name__ == "__main__":
    sys.exit(main())
