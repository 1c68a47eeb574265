"""The deliberate breaks: one or more for every kind of numeric case."""

import dataclasses

_CASES = ("tests/golden/test_cases.py",)
_WEIGHTS = ("tests/eqx_loss/test_weights.py",)
_OUTPUT = ("tests/eqx_loss/test_output.py",)
_MESH = ("tests/eqx_loss/test_linear_xent_mesh.py::test_every_layout_equals_the_oracle",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
    """One break.

    Attributes:
        kind: Kind of numeric case that the bug belongs to.
        bug: The bug, as its reporters would say it.
        file: File to change, from the root of the repository.
        old: Text that stands exactly once in the file.
        new: What replaces it.
        tests: Where the bug must be noticed.
    """

    kind: str
    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        kind="gradient_accumulation",
        bug="micro-steps are averaged instead of added",
        file="eqx_loss/_output.py",
        old="return jax.tree.map(jnp.add, first, second)",
        new="return jax.tree.map(lambda a, b: (a + b) / 2, first, second)",
        tests=_OUTPUT,
    ),
    Mutation(
        kind="data_parallel",
        bug="the count of one rank divides, not that of all rows",
        file="eqx_loss/_weights.py",
        old="            total = jnp.sum(values)\n",
        new="            total = jnp.sum(values[0])\n",
        tests=_WEIGHTS,
    ),
    Mutation(
        kind="zero_token",
        bug="an empty group is 0 / 0",
        file="eqx_loss/_reduce.py",
        old="return jnp.where(present, numerator / jnp.where(present, denominator, 1), 0)",
        new="return numerator / denominator",
        tests=_WEIGHTS,
    ),
    Mutation(
        kind="zero_token",
        bug="an empty row is left out of the mean over rows",
        file="eqx_loss/_weights.py",
        old="            present = jnp.ones((num_rows,), bool) if count_empty else jnp.any(mask, axis=1)",
        new="            present = jnp.any(mask, axis=1)",
        tests=_WEIGHTS,
    ),
    Mutation(
        kind="label_shift",
        bug="the first label of a row counts as a target",
        file="eqx_loss/_targets.py",
        old="    return shift_targets(tokens, ones, depth=1, segment_ids=segment_ids)",
        new="    return shift_targets(tokens, ones, depth=0, segment_ids=segment_ids)",
        tests=("tests/eqx_loss/test_targets.py",),
    ),
    Mutation(
        kind="packing",
        bug="the last token of a document predicts the first of the next",
        file="eqx_loss/_targets.py",
        old="    return (segment_ids == following) & (segment_ids != 0)",
        new="    return (following != 0) & (segment_ids != 0)",
        tests=("tests/eqx_loss/test_targets.py",),
    ),
    Mutation(
        kind="mtp",
        bug="every depth is divided by the lm count",
        file="eqx_loss/_loss_weights.py",
        old="        return [factor / len(mtp) * head.objective() for head in mtp]",
        new="        return [factor / len(mtp) * head.votes() / lm.total() for head in mtp]",
        tests=_OUTPUT,
    ),
    Mutation(
        kind="mtp",
        bug="the mask of a depth is not shifted with its targets",
        file="eqx_loss/_loss_weights.py",
        old="_HeadMask(shift_left(loss_mask, joined, depth=k),",
        new="_HeadMask(loss_mask,",
        tests=_OUTPUT,
    ),
    Mutation(
        kind="moe_aux",
        bug="load-balance counts are those of one row, not of the unit",
        file="eqx_loss/_router_output.py",
        old="units = load_balance_units(counts, scope, micro_batch_size=_unit_rows(semantics, layout, num_rows))",
        new="units = counts",
        tests=_OUTPUT,
    ),
    Mutation(
        kind="moe_aux",
        bug="the routed share carries a gradient",
        file="eqx_loss/_router.py",
        old="    assigned = jax.lax.stop_gradient(counts.astype(score_sums.dtype))",
        new="    assigned = counts.astype(score_sums.dtype)",
        tests=("tests/eqx_loss/test_router.py",),
    ),
    Mutation(
        kind="z_loss",
        bug="a z-loss that is switched off is still applied",
        file="eqx_loss/_xent.py",
        old="    if z_loss_multiplier > 0:",
        new="    if True:\n        z_loss_multiplier = z_loss_multiplier or 1e-2",
        tests=("tests/eqx_loss/test_xent.py",),
    ),
    Mutation(
        kind="z_loss",
        bug="the z term is averaged over all positions",
        file="eqx_loss/_xent.py",
        old="z_term=jnp.where(mask, jnp.square(log_partition), 0)",
        new="z_term=jnp.square(log_partition)",
        tests=("tests/eqx_loss/test_xent.py",),
    ),
    Mutation(
        kind="chunked_xent",
        bug="columns of a padded vocabulary enter the log-partition",
        file="eqx_loss/_xent.py",
        old="        scores = jnp.where(jnp.arange(num_columns) < num_classes, scores, -jnp.inf)",
        new="        scores = jnp.where(jnp.arange(num_columns) < num_classes, scores, 0)",
        tests=("tests/eqx_loss/test_xent.py",),
    ),
    Mutation(
        kind="masking",
        bug="masked rows are multiplied by 0 instead of replaced",
        file="eqx_loss/_xent.py",
        old="    scores = jnp.where(mask[..., None], logits.astype(dtype), 0)",
        new="    scores = logits.astype(dtype) * mask[..., None]",
        tests=("tests/eqx_loss/test_xent.py",),
    ),
    Mutation(
        kind="precision",
        bug="the loss of bfloat16 logits is computed in bfloat16",
        file="eqx_loss/_xent.py",
        old="    dtype = jnp.promote_types(logits.dtype, jnp.float32)",
        new="    dtype = logits.dtype",
        tests=("tests/eqx_loss/test_xent.py",),
    ),
    Mutation(
        kind="logging",
        bug="a log is the mean of means",
        file="eqx_loss/_reduce.py",
        old="        return SumCount(sum=self.sum + other.sum, count=self.count + other.count)",
        new="        return SumCount(sum=(self.value() + other.value()) / 2, count=jnp.ones_like(self.count))",
        tests=("tests/eqx_loss/test_reduce.py",),
    ),
    Mutation(
        kind="logging",
        bug="the objective's flag changes the lm log",
        file="eqx_loss/_output.py",
        old="        lm=SumCount(jnp.sum(votes * lm.xent), lm_count),",
        new="        lm=SumCount(jnp.sum(weights.lm_objective * lm.xent), jnp.sum(weights.lm_objective)),",
        tests=_OUTPUT,
    ),
    Mutation(
        kind="weighting",
        bug="fractional weights are applied twice",
        file="eqx_loss/_weights.py",
        old="        votes = jnp.where(mask, token_scale.astype(dtype), 0)",
        new="        votes = jnp.where(mask, token_scale.astype(dtype) ** 2, 0)",
        tests=_WEIGHTS,
    ),
    Mutation(
        kind="aggregation_mode",
        bug="a constant divisor is not multiplied by the number of groups",
        file="eqx_loss/_weights.py",
        old="guarded_ratio(scored.astype(dtype), own * present)",
        new="guarded_ratio(scored.astype(dtype), own * jnp.ones_like(present))",
        tests=_CASES,
    ),
    Mutation(
        kind="parity",
        bug="per-sample and per-token objectives are the same",
        file="eqx_loss/_semantics.py",
        old="        return Granularity.TOKEN if self.calculate_per_token_loss else self.group_granularity",
        new="        return Granularity.TOKEN",
        tests=_OUTPUT,
    ),
    Mutation(
        kind="vocab_parallel",
        bug="the partition of a vocabulary shard is added without moving it to the common peak",
        file="eqx_loss/_linear_xent_tile.py",
        old="partition = jnp.sum(shards[:, 1] * jnp.exp(shards[:, 0] - peak), axis=0)",
        new="partition = jnp.sum(shards[:, 1], axis=0)",
        tests=_MESH,
    ),
    Mutation(
        kind="vocab_parallel",
        bug="a score that is whole already is added once more for every shard",
        file="eqx_loss/_linear_xent_tile.py",
        old="place = targets - columns.ids[0]",
        new="place = (targets - columns.ids[0]) % cut.num_columns",
        tests=_MESH,
    ),
    Mutation(
        kind="resume",
        bug="the log interval in progress is not restored",
        file="train/_metrics.py",
        old='        leaves = tuple(np.asarray(leaf, dtype=np.float64) for leaf in tree["leaves"])\n',
        new="        leaves = ()\n",
        tests=("tests/train/test_metrics.py",),
    ),
    Mutation(
        kind="resume",
        bug="an accumulator is rounded when it is written",
        file="train/_metrics.py",
        old="[leaf.tolist() for leaf in self.leaves]",
        new="[leaf.astype(np.float32).tolist() for leaf in self.leaves]",
        tests=("tests/train/test_metrics.py",),
    ),
    Mutation(
        kind="resume",
        bug="the data start again from the first batch",
        file="train/_data.py",
        old='    iterator.set_state({"next_index": step})\n',
        new="",
        tests=("tests/train/test_data.py",),
    ),
    Mutation(
        kind="pipeline_parallel",
        bug="micro-batches divide although the schedule adds them",
        file="eqx_loss/_scale.py",
        old='        return divisor * (self.micro_steps if self.over_micro_steps == "mean" else 1)',
        new="        return divisor * self.micro_steps",
        tests=("tests/examples/test_scale.py",),
    ),
    Mutation(
        kind="pipeline_parallel",
        bug="the gradient is not clipped by the norm of what is applied",
        file="train/_optimizer.py",
        old="        scale = clip_scale(raw_norm, self.config.max_grad_norm)",
        new="        scale = clip_scale(raw_norm**2, self.config.max_grad_norm)",
        tests=("tests/train/test_optimizer.py",),
    ),
    Mutation(
        kind="data_parallel",
        bug="an average over ranks is not undone",
        file="eqx_loss/_scale.py",
        old='        divisor = self.data_ranks if self.over_data == "mean" else 1',
        new="        divisor = 1",
        tests=("tests/examples/test_scale.py",),
    ),
)
