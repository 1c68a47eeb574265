"""`python -m train CONFIG [key.path=value ...]`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
