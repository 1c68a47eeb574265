"""What a parameter is: its dimensions, its role, and the matrix a matrix optimizer sees.

The dimensions come from the field's own annotation; role and matrix are written beside the field:

    nope: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "H K"))
"""

import dataclasses
import types
import typing
from typing import Any, Literal

import equinox as eqx
import jax
from jaxtyping import PyTree

# Fewest and most leading axes of layers that the arrays under a field of `Transformer` have.
STACKED = {"layers": (0, 1)}
Role = Literal["matrix", "embedding", "head", "norm", "bias", "router_bias", "conv", "decay"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Facts about one parameter array.

    Attributes:
        axes: One name per axis, space separated, e.g. "L E D F"; leading Ls are scans over layers.
            Names are the dimension letters of the style page, and also W (convolution taps), J (key/value heads),
            CR (kv latent and rope dims side by side), D2 (embedding and hidden width side by side).
        role: "matrix" for weights of matrix products; "embedding" and "head" for the two ends; "norm" scales;
            "bias" additive; "router_bias" (no gradient, updated outside the optimizer); "conv" kernels;
            "decay" for A_log and dt_bias.
        rows: Axes (names, in order) that together are the input side of one matrix; "" unless role is "matrix".
        columns: Axes that together are its output side. Axes in neither are independent matrices.
    """

    axes: str
    role: Role
    rows: str = ""
    columns: str = ""


def matrix(rows: str, columns: str) -> dict[str, str]:
    """Metadata of a field whose array holds matrices from `rows` axes to `columns` axes."""
    return {"role": "matrix", "rows": rows, "columns": columns}


def param(role: Role) -> dict[str, str]:
    """Metadata of a field of another role than "matrix"."""
    return {"role": role, "rows": "", "columns": ""}


def param_specs(model: eqx.Module) -> PyTree[ParamSpec]:
    """A tree like `model` with a `ParamSpec` in place of every array.

    Works on a model of arrays or of `jax.ShapeDtypeStruct`s (from `eqx.filter_eval_shape`). Arrays of stacked layers
    have an "L" in front for each leading axis.

    Raises:
        ValueError: If an array field declares no role, or its rank is not that of its axes.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(model)
    return jax.tree_util.tree_unflatten(treedef, [_spec(model, path, leaf) for path, leaf in flat])


def field_spec(owner: type, name: str) -> ParamSpec:
    """What the parameter field `name` of a module class declares, without a scan axis.

    Raises:
        ValueError: If the field declares no role.
    """
    field = next(f for f in dataclasses.fields(owner) if f.name == name)
    if "role" not in field.metadata:
        raise ValueError(
            f"{owner.__name__}.{name} declares no role; annotate it with matrix(...) or param(...)"
        )
    return ParamSpec(axes=_declared_axes(owner, name), **field.metadata)


def _spec(model: eqx.Module, path: tuple[Any, ...], leaf: Any) -> ParamSpec:
    owner: Any = model
    for key in path[:-1]:
        owner = getattr(owner, key.name) if isinstance(key, jax.tree_util.GetAttrKey) else owner[key.idx]
    name, where = path[-1].name, jax.tree_util.keystr(path)
    spec = field_spec(type(owner), name)
    fewest, most = STACKED.get(getattr(path[0], "name", ""), (0, 0))
    stacked = len(leaf.shape) - len(spec.axes.split())
    spec = dataclasses.replace(spec, axes=" ".join([*["L"] * min(max(stacked, fewest), most), spec.axes]))
    if len(spec.axes.split()) != len(leaf.shape):
        raise ValueError(f"{where} has shape {leaf.shape} but axes {spec.axes!r}; correct the annotation")
    return spec


def _declared_axes(owner: type, name: str) -> str:
    """The shape string of a field's annotation, `Float[Array, "D F"]` or a union of it with None."""
    hint = typing.get_type_hints(owner)[name]
    options = (
        typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    )
    return next(option.dim_str.strip() for option in options if hasattr(option, "dim_str"))
