"""Re-derives every right value and every bug's value: `python conformance/derivation/rederive.py`.

Plain Python, standard library only, independent of the NumPy generator.
"""

import decimal
import json
import pathlib

import bugs_advanced
import bugs_auxiliary
import bugs_core
import plain_advanced
import plain_auxiliary
import plain_core
from arithmetic import CONTEXT

HERE = pathlib.Path(__file__).resolve().parent

SOLVERS = {
    "objective": plain_core.objective,
    "per_token": plain_core.per_token,
    "evaluation": plain_core.evaluation,
    "next_token": plain_core.next_token,
    "targets": plain_core.shifted_targets,
    "mtp": plain_auxiliary.mtp,
    "router_z": plain_auxiliary.router_z,
    "load_balance": plain_auxiliary.load_balance,
    "lm_z": plain_auxiliary.lm_z,
    "linear_head": plain_advanced.linear_head,
    "weighted": plain_advanced.weighted,
    "domains": plain_advanced.domains,
    "aggregation": plain_advanced.aggregation,
    "logged_ratio": plain_advanced.logged_ratio,
    "second_term": plain_advanced.second_term,
    "resume": plain_advanced.resume,
    "clip": plain_advanced.clip,
    "pipeline": plain_advanced.pipeline,
    "gradient_scale": plain_advanced.gradient_scale,
    "estimators": plain_advanced.estimators,
    "estimator_gap": plain_advanced.estimator_gap,
}

BY_TASK = {
    "objective": bugs_core.objective,
    "per_token": bugs_core.per_token,
    "evaluation": bugs_core.evaluation,
    "next_token": bugs_core.next_token,
    "targets": bugs_core.targets,
    "mtp": bugs_auxiliary.mtp,
    "router_z": bugs_auxiliary.router_z,
    "load_balance": bugs_auxiliary.load_balance,
    "lm_z": bugs_auxiliary.lm_z,
    "linear_head": bugs_advanced.linear_head,
    "weighted": bugs_advanced.weighting,
    "domains": bugs_advanced.domains,
    "aggregation": bugs_advanced.aggregation,
    "logged_ratio": bugs_advanced.logged_ratio,
    "second_term": bugs_advanced.second_term,
    "resume": bugs_advanced.resume,
    "clip": bugs_advanced.clip,
    "pipeline": bugs_advanced.pipeline,
    "gradient_scale": bugs_advanced.gradient_scale,
    "estimators": bugs_advanced.estimators,
    "estimator_gap": bugs_advanced.estimator_gap,
}


def solve(entry):
    """The answers to one case, by name."""
    with decimal.localcontext(CONTEXT):  # fifty digits for the operators too
        return SOLVERS[entry["task"]](entry["inputs"])


def wrong_values(entry, name):
    """The values that the named faulty method gives on a case."""
    with decimal.localcontext(CONTEXT):
        return BY_TASK[entry["task"]](entry["inputs"], entry["expected"])[name]()


def check(cases):
    """Differences between the stored numbers and this derivation, by case or case and bug."""
    found = {}
    for entry in cases:
        found[entry["id"]] = differences(entry["expected"], solve(entry))
        for bug in entry["known_bugs"]:
            name = f"{entry['id']}: {bug['name']}"
            found[name] = differences(bug["values"], wrong_values(entry, bug["name"]))
    return found


def differences(right, found, rtol=1e-9, atol=1e-12, path=""):
    """Paths at which two nested answers differ."""
    if isinstance(right, dict):
        return [
            d for name in right for d in differences(right[name], found[name], rtol, atol, f"{path}.{name}")
        ]
    if isinstance(right, list):
        pairs = enumerate(zip(right, found, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, rtol, atol, f"{path}[{i}]")]
    if isinstance(right, str) or isinstance(found, str):  # nan, inf, -inf
        return [] if right == found else [f"{path}: {right} against {found}"]
    return [] if abs(right - found) <= atol + rtol * abs(right) else [f"{path}: {right} against {found}"]


if __name__ == "__main__":
    stored = [json.loads(path.read_text()) for path in sorted((HERE.parent / "cases").rglob("*.json"))]
    results = check(stored)
    for title, found in results.items():
        if found:
            print(title, *found[:5], sep="\n  ")
    agree = sum(not found for found in results.values())
    print(f"{agree} of {len(results)} answers and bugs agree ({len(stored)} cases)")
    raise SystemExit(agree != len(results))
