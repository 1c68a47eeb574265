"""Settings of reference runs, and the batch and parameters of each. NumPy only."""

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


SHORT = ("1111111", "1100000", "1111100", "1011010")
LONG = ("11111100", "10110110", "11100000", "01111111")

SETTINGS = (
    Setting(name="lm_n4", masks=SHORT, num_microbatches=4),
    Setting(name="lm_n2_mbs2", masks=SHORT, num_microbatches=2, micro_batch_size=2),
    Setting(name="lm_fraction_n2", masks=("5511200", "2000000"), num_microbatches=2),
    Setting(name="mtp2_n2", masks=SHORT[::2], num_microbatches=2, mtp_layers=2),
    Setting(name="mtp1_fraction_n2", masks=("5511200", "2770000"), num_microbatches=2, mtp_layers=1),
    Setting(name="mtp1_zero_n2", masks=("1111111", "1000000"), num_microbatches=2, mtp_layers=1),
    Setting(
        name="packed_mtp2_n2",
        masks=("1111111", "1111011"),
        num_microbatches=2,
        mtp_layers=2,
        cu_seqlens=((0, 3, 7), (0, 5, 7)),
    ),
    Setting(
        name="all_mbs2_n2",
        masks=SHORT,
        num_microbatches=2,
        micro_batch_size=2,
        num_layers=2,
        mtp_layers=1,
        moe=True,
        z_coeff=0.05,
        aux=(("aux_loss", 0.3),),
    ),
    Setting(
        name="pad_mtp1_mbs2_n2",
        masks=SHORT,
        num_microbatches=2,
        micro_batch_size=2,
        mtp_layers=1,
        moe=True,
        z_coeff=0.05,
        aux=(("aux_loss", 0.3),),
        padding=(0, 5, 2, 1),
    ),
    Setting(
        name="pad_seqaux_mbs2_n2",
        masks=SHORT,
        num_microbatches=2,
        micro_batch_size=2,
        mtp_layers=2,
        moe=True,
        aux=(("seq_aux_loss", 0.3),),
        padding=(0, 5, 2, 1),
    ),
    Setting(
        name="two_aux_n2",
        masks=SHORT[:2],
        num_microbatches=2,
        moe=True,
        aux=(("aux_loss", 0.3), ("seq_aux_loss", 0.1)),
    ),
    Setting(
        name="z_aux_alltokens_zero",
        masks=("0000000", "0000000"),
        num_microbatches=2,
        moe=True,
        z_coeff=0.05,
        aux=(("seq_aux_loss", 0.3),),
    ),
    Setting(
        name="pad_globalaux_n3",
        masks=SHORT[:3],
        num_microbatches=3,
        moe=True,
        aux=(("global_aux_loss", 0.3),),
        padding=(0, 5, 2),
    ),
    Setting(
        name="globalaux_mbs2_n2_dp2",
        masks=SHORT + SHORT[::-1],
        num_microbatches=2,
        micro_batch_size=2,
        dp=2,
        moe=True,
        aux=(("global_aux_loss", 0.3),),
        padding=(0, 5, 2, 1, 0, 0, 3, 0),
    ),
    Setting(
        name="all_n2_dp2",
        masks=SHORT,
        num_microbatches=2,
        dp=2,
        num_layers=2,
        mtp_layers=2,
        moe=True,
        z_coeff=0.05,
        aux=(("seq_aux_loss", 0.3),),
        padding=(0, 5, 2, 1),
    ),
    Setting(
        name="all_n2_cp2",
        masks=LONG[:2],
        num_microbatches=2,
        cp=2,
        mtp_layers=1,
        moe=True,
        z_coeff=0.05,
        aux=(("seq_aux_loss", 0.3),),
        padding=(1, 3),
    ),
    Setting(
        name="aux_mbs2_cp2",
        masks=LONG,
        num_microbatches=2,
        micro_batch_size=2,
        cp=2,
        moe=True,
        z_coeff=0.05,
        aux=(("aux_loss", 0.3),),
        padding=(1, 3, 5, 0),
    ),
    Setting(
        name="all_n1_dp2_cp2",
        masks=LONG[:2],
        num_microbatches=1,
        dp=2,
        cp=2,
        mtp_layers=1,
        moe=True,
        z_coeff=0.05,
        aux=(("global_aux_loss", 0.3),),
        padding=(1, 3),
    ),
)


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
