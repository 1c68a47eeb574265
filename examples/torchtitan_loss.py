"""torchtitan: a loss with token weights in place of `CrossEntropyLoss`.

torchtitan sums over ranks (FSDP's division is switched off) and over micro-steps, and passes
`global_valid_tokens` to divide by. The weighted loss needs no division, so it ignores that number;
the weights of the local rows come with the labels.
"""

from dataclasses import dataclass

import torch
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, CrossEntropyLoss

from eqx_loss.numpy import token_weights


class WeightedCrossEntropyLoss(BaseLoss):
    """`sum(weights * xent)`; pass `weights=` as a further loss input, cut like the labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config, *, compile_config=None):
        self.fn = weighted_cross_entropy
        self._maybe_compile(compile_config)

    def __call__(self, pred, labels, global_valid_tokens=None, *, weights):
        return self.fn(pred, labels, weights), {}


def weighted_cross_entropy(pred, labels, weights):
    losses = torch.nn.functional.cross_entropy(
        pred.flatten(0, 1).float(), labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return torch.sum(losses * weights.flatten())


def main():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 6, 11, generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 2, 5, 2, 4, 6])[:, None]
    labels = torch.where(mask, torch.randint(11, (8, 6), generator=generator), IGNORE_INDEX)
    ours, theirs = (
        WeightedCrossEntropyLoss(WeightedCrossEntropyLoss.Config()),
        CrossEntropyLoss(CrossEntropyLoss.Config()),
    )
    token = torch.from_numpy(token_weights(mask.numpy(), "token")).float()
    expected, _ = theirs(logits, labels, global_valid_tokens=mask.sum())
    found = sum(
        ours(logits[rows], labels[rows], weights=token[rows])[0] for rows in ([0, 1, 2], [3], [4, 5, 6, 7])
    )
    torch.testing.assert_close(found, expected)
    sample = torch.from_numpy(token_weights(mask.numpy(), "sample")).float()
    rows = [
        theirs(logits[b : b + 1], labels[b : b + 1], global_valid_tokens=mask[b].sum())[0] for b in range(8)
    ]
    torch.testing.assert_close(ours(logits, labels, weights=sample)[0], torch.stack(rows).mean())
    print(f"token mean {expected:.4f}, sample mean {torch.stack(rows).mean():.4f}")


if __name__ == "__main__":
    main()
