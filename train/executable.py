"""Running what `python -m train.aot CONFIG --topology NAME --save FILE` wrote, without compiling it again."""

from ._aot_executable import ExecutableError as ExecutableError
from ._aot_executable import LoadedStep as LoadedStep
from ._aot_executable import load_executable as load_executable
from ._config_load import load_config as load_config
