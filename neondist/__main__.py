"""`python -m neondist` is the `neondist` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
