"""The conformance kit from Python: its runner, and this package's own answers to its cases.

A side room of `eqx_loss`. The kit itself (cases, protocol, runner, adapters) is the top-level
folder `conformance/`, which imports neither JAX nor us and may be copied into other projects.
"""

from ._answers import answer as answer
from ._kit import cases as cases
from ._kit import main as main
from ._kit import run as run
