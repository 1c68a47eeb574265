"""`python -m eqx_loss explain`."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from .._router import LoadBalanceScope
from .._semantics import LossSemantics
from ..gap import GapError, GapSummary, read_run
from ._batch import read_masks
from ._diff import Difference, TermDifference, diff_semantics, measure_difference
from ._explanation import NOTATION, Explanation, TermExplanation
from ._output_layer import BACKENDS, DTYPES, plan_facts, plan_output_layer, plan_text
from ._profile import PROFILES, make_profile, parse_profile, read_config
from ._terms import explain_semantics

DONE, UNUSABLE = 0, 2
_LINES = ("objective", "divided", "coefficient", "log", "world_size", "accumulation", "micro_batch_size")
_LABELS = {
    "objective": "objective",
    "divided": "what by what",
    "coefficient": "coefficient",
    "log": "log",
    "world_size": "more ranks change",
    "accumulation": "more micro-steps change",
    "micro_batch_size": "another micro-batch size changes",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the explanation or the difference.

    Returns:
        0, or 2 when the arguments or a file cannot be used (the reason is on stderr).
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 for bad arguments
        return stop.code if isinstance(stop.code, int) else UNUSABLE
    try:
        if arguments.output_layer:
            text = _output_layer(arguments)
        else:
            text = _diff(arguments) if arguments.diff else _explain(arguments)
    except (ValueError, OSError, GapError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return UNUSABLE
    print(text)
    return DONE


def _explain(arguments: argparse.Namespace) -> str:
    if arguments.masks or arguments.run:
        raise ValueError("--masks and --run measure a difference; give --diff A B")
    if arguments.config and arguments.profile:
        raise ValueError("give --config or --profile, not both")
    semantics = read_config(arguments.config) if arguments.config else _profile(arguments)
    explanation = explain_semantics(semantics, num_mtp_layers=arguments.num_mtp_layers)
    if arguments.json:
        return _json({**dataclasses.asdict(explanation), "notation": list(NOTATION)})
    return _explanation_text(explanation)


def _output_layer(arguments: argparse.Namespace) -> str:
    num_tokens, width, vocab_size = arguments.output_layer
    plan = plan_output_layer(num_tokens, width, vocab_size, arguments.backend, arguments.dtype)
    return _json(plan_facts(plan)) if arguments.json else plan_text(plan)


def _profile(arguments: argparse.Namespace) -> LossSemantics:
    names = ("calculate_per_token_loss", "micro_batch_size", "context_parallel_size", "packed_sequences")
    names += ("mtp_loss_scaling_factor", "moe_z_loss_weight", "load_balance_loss_weight")
    names += ("load_balance_scope", "z_loss_multiplier")
    options = {name: getattr(arguments, name) for name in names}
    given = {name: str(value) for name, value in options.items() if value is not None}
    return make_profile(arguments.profile or "ours", arguments.release, given)


def _diff(arguments: argparse.Namespace) -> str:
    first, second = (parse_profile(text) for text in arguments.diff)
    lines = diff_semantics(first, second, num_mtp_layers=arguments.num_mtp_layers)
    measured: tuple[Difference, ...] = ()
    if arguments.masks:
        batch = read_masks(
            arguments.masks,
            num_mtp_layers=arguments.num_mtp_layers,
            num_micro_steps=arguments.gradient_accumulation_steps,
            data_parallel_size=arguments.data_parallel_size,
        )
        measured = measure_difference(first, second, batch)
    gaps = read_run(arguments.run) if arguments.run else []
    if arguments.json:
        return _json(
            {
                "first": arguments.diff[0],
                "second": arguments.diff[1],
                "differences": [dataclasses.asdict(line) for line in lines],
                "measured": [dataclasses.asdict(entry) for entry in measured],
                "gaps": [dataclasses.asdict(gap) for gap in gaps],
            }
        )
    parts = [_difference_text(arguments.diff, lines)]
    if measured:
        parts.append(_measured_text(measured))
    if gaps:
        parts.append(_gap_text(first, second, gaps))
    return "\n\n".join(parts)


def _explanation_text(explanation: Explanation) -> str:
    parts = [explanation.title, "\n".join(NOTATION)]
    return "\n\n".join([*parts, *(_term_text(term) for term in explanation.terms)])


def _term_text(term: TermExplanation) -> str:
    width = max(len(label) for label in _LABELS.values())
    lines = [f"{term.name}{'' if term.coefficient else '  (off: coefficient 0)'}"]
    lines += [f"  {_LABELS[name]:<{width}}  {_shown(getattr(term, name))}" for name in _LINES]
    return "\n".join([*lines, *(f"  note: {note}" for note in term.notes)])


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _difference_text(names: Sequence[str], lines: tuple[TermDifference, ...]) -> str:
    if not lines:
        return f"{names[0]} and {names[1]} have the same rules"
    parts: list[str] = []
    for line in lines:
        parts += [
            f"{line.term}, {line.aspect.replace('_', ' ')}",
            f"  A  {line.first}",
            f"  B  {line.second}",
        ]
    return "\n".join([f"A: {names[0]}", f"B: {names[1]}", *parts])


def _measured_text(measured: tuple[Difference, ...]) -> str:
    lines = ["On this batch (B against A; weights of the tokens, so no model is needed):"]
    for entry in measured:
        lines.append(
            f"  {entry.term:<28} sum {entry.first_sum:.6g} -> {entry.second_sum:.6g}, weights differ by "
            f"{entry.relative:.2%}, a token's by x {entry.smallest:.4g} to x {entry.largest:.4g}"
        )
        if entry.first_objective is not None:
            lines.append(f"  {'':<28} objective {entry.first_objective:.6f} -> {entry.second_objective:.6f}")
    return "\n".join(lines)


def _gap_text(first: LossSemantics, second: LossSemantics, gaps: list[GapSummary]) -> str:
    lines = ["In this run (logged estimator gaps, mean over groups minus mean over tokens):"]
    lines += [
        f"  {gap.name:<33} {gap.mean:+.3e} +- {gap.standard_error:.1e} ({gap.relative:+.3%} of the log, "
        f"{gap.num_steps} steps)"
        for gap in gaps
    ]
    if first.calculate_per_token_loss == second.calculate_per_token_loss:
        lines.append("  A and B have the same flag: a log cannot tell them apart; measure with --masks")
    else:
        sign = "A to B" if first.calculate_per_token_loss else "B to A"
        lines.append(f"  the lm objective moves by the lm gap from {sign} (if groups are the run's groups)")
    return "\n".join(lines)


def _json(content: Any) -> str:
    return json.dumps(content, indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_loss explain",
        description="Say, per loss term, what is divided by what, and what ranks, accumulation and "
        "micro-batch size change. With --diff, say where two profiles differ.",
        epilog="A or B of --diff: NAME[:RELEASE][,option=value...], for example "
        "megatron:0.16,calculate_per_token_loss=false,micro_batch_size=2, or a run's YAML file.",
    )
    flags = ("true", "false")
    parser.add_argument("--config", type=pathlib.Path, metavar="YAML", help="a run's configuration")
    parser.add_argument("--profile", choices=PROFILES, help="default: ours")
    parser.add_argument("--release", help="of megatron (0.12 ... 0.19, main) or maxtext (0.2.4, 0.2.5)")
    parser.add_argument("--calculate-per-token-loss", choices=flags)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--context-parallel-size", type=int, help="megatron only")
    parser.add_argument("--packed-sequences", choices=flags, help="megatron only")
    parser.add_argument("--mtp-loss-scaling-factor", type=float)
    parser.add_argument("--moe-z-loss-weight", type=float)
    parser.add_argument("--load-balance-loss-weight", type=float)
    parser.add_argument("--load-balance-scope", choices=[scope.value for scope in LoadBalanceScope])
    parser.add_argument("--z-loss-multiplier", type=float)
    parser.add_argument("--num-mtp-layers", type=int, default=1, help="MTP depths of the model (default 1)")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="two profiles")
    parser.add_argument("--masks", type=pathlib.Path, help=".npz or .json with loss_mask, for --diff")
    parser.add_argument("--run", type=pathlib.Path, help="run folder or metrics.jsonl, for --diff")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1, help="of the batch in --masks")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="of the batch in --masks")
    sizes = ("T", "D", "V")
    parser.add_argument(
        "--output-layer",
        nargs=3,
        type=int,
        metavar=sizes,
        help="instead: how the fused output layer runs for T tokens, width D and V columns on one device",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="tpu", help="for --output-layer (default tpu)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="for --output-layer")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
