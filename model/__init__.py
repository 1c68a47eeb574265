"""Equinox language models: the Ling-3 architecture and the family around it. They return facts and know no loss."""

from ._axes import Axes as Axes
from ._config import GqaConfig as GqaConfig
from ._config import KdaConfig as KdaConfig
from ._config import LayerPlan as LayerPlan
from ._config import LightningConfig as LightningConfig
from ._config import MlaConfig as MlaConfig
from ._config import ModelConfig as ModelConfig
from ._config import MoeConfig as MoeConfig
from ._config import MtpConfig as MtpConfig
from ._config import RopeConfig as RopeConfig
from ._config import YarnConfig as YarnConfig
from ._output import ModelOutput as ModelOutput
from ._output import RouterStats as RouterStats
from ._parallel import Cut as Cut
from ._parallel import Parallel as Parallel
from ._parallel import cut_axes as cut_axes
from ._parallel import cut_dimension as cut_dimension
from ._parallel import is_expert as is_expert
from ._parallel import looks_up as looks_up
from ._param import ParamSpec as ParamSpec
from ._param import param_specs as param_specs
from ._transformer import Transformer as Transformer
from ._transformer import init_model as init_model
