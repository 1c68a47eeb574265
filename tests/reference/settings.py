"""A reference run: its setting, and the batch and parameters of each. NumPy only."""

import dataclasses

import numpy as np

VOCAB, HIDDEN, EXPERTS, ACTIVE = 11, 6, 4, 2
MIN_MARGIN = 1e-3  # between the last kept and the first dropped router score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One training step of the toy model.

    Attributes:
        name: File name without the flag.
        masks: One string per row: a digit is the weight of a position in ninths of 9 ("9" and "1"
            both mean 1; "5" means 0.5), "0" is not scored.
        num_microbatches: Per data rank.
        micro_batch_size: Rows.
        dp: Data ranks.
        cp: Context ranks.
        num_layers: Decoder layers.
        mtp_layers: MTP depths.
        mtp_scale: mtp_loss_scaling_factor.
        moe: True gives every layer a router.
        z_coeff: Router z coefficient or None.
        aux: (type, coefficient) of load-balance losses.
        padding: Padding positions at the end of each row, or None for no padding mask.
        cu_seqlens: Document bounds of each row, or None.
        seed: Of parameters and batch.
    """

    name: str
    masks: tuple[str, ...]
    num_microbatches: int
    micro_batch_size: int = 1
    dp: int = 1
    cp: int = 1
    num_layers: int = 1
    mtp_layers: int = 0
    mtp_scale: float = 0.1
    moe: bool = False
    z_coeff: float | None = None
    aux: tuple[tuple[str, float], ...] = ()
    padding: tuple[int, ...] | None = None
    cu_seqlens: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0

    @property
    def world_size(self) -> int:
        return self.dp * self.cp

    @property
    def channels(self) -> tuple[str, ...]:
        names = ["total"]
        if self.mtp_layers or self.z_coeff or self.aux:
            names.append("lm")
        if self.mtp_layers:
            names.append("mtp")
        if self.z_coeff:
            names.append("z")
        if self.aux:
            names.append("aux")
        return tuple(names)

    def loss_mask(self) -> np.ndarray:
        weights = {"0": 0.0, "1": 1.0, "9": 1.0, "5": 0.5, "2": 0.2, "7": 0.7}
        return np.array([[weights[c] for c in row] for row in self.masks])

    def order(self) -> np.ndarray:
        shape = (self.num_microbatches, self.dp, self.micro_batch_size)
        return np.arange(len(self.masks)).reshape(shape)


def batch(setting: Setting) -> dict[str, np.ndarray]:
    """tokens, labels, loss_mask, order, and padding_mask (True = padding) when the setting has one."""
    rng = np.random.default_rng(setting.seed + 1)
    mask = setting.loss_mask()
    drawn = rng.integers(1, VOCAB, (mask.shape[0], mask.shape[1] + 1))
    arrays = {
        "tokens": drawn[:, :-1],
        "labels": drawn[:, 1:],
        "loss_mask": mask,
        "order": setting.order(),
    }
    if setting.padding is not None:
        place = np.arange(mask.shape[1])[None]
        arrays["padding_mask"] = place >= mask.shape[1] - np.array(setting.padding)[:, None]
    return arrays


def parameters(setting: Setting) -> dict[str, np.ndarray]:
    """Parameters by name, `[out, in]`, of standard deviation 0.7."""
    rng = np.random.default_rng(setting.seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, HIDDEN), "out": (VOCAB, HIDDEN)}
    names = [f"dec{i}" for i in range(setting.num_layers)] + [f"mtp{i}" for i in range(setting.mtp_layers)]
    for name in names:
        if name.startswith("mtp"):
            shapes[f"{name}.proj"] = (HIDDEN, 2 * HIDDEN)
        shapes[f"{name}.w"] = (HIDDEN, HIDDEN)
        if setting.moe:
            shapes[f"{name}.router"] = (EXPERTS, HIDDEN)
            shapes[f"{name}.experts"] = (EXPERTS, HIDDEN)
    return {name: 0.7 * rng.standard_normal(shape) for name, shape in shapes.items()}
