"""`python -m train.config`: tools for configuration files."""

import sys

from ._config_import import main as main

if __name__ == "__main__":
    sys.exit(main())
