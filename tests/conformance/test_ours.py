"""eqx_loss passes its own kit, in both precisions, and the runner tells when it would not."""

import jax
import pytest

from eqx_loss import conformance

SKIPPED = {"advanced/normalize_then_clip", "advanced/pipeline_scale_once"}  # the trainer's business


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_eqx_loss_passes_every_case_it_answers(dtype):
    with jax.enable_x64(dtype == "float64"):
        results = conformance.run(conformance.answer, dtype=dtype)
    wrong = {case: result for case, result in results.items() if result[0] not in ("pass", "skip")}
    assert wrong == {}
    assert {case for case, result in results.items() if result[0] == "skip"} == SKIPPED


def test_a_wrong_granularity_is_named():
    def wrong(request):
        inputs = {**request["inputs"], "granularity": "token"}
        return (
            conformance.answer({**request, "inputs": inputs})
            if request["task"] == "objective"
            else {"skip": "-"}
        )

    with jax.enable_x64(True):
        results = conformance.run(wrong, tiers=("core",))
    for case in ("sample_mean_with_an_empty_row", "micro_batch_mean_of_two_rows", "document_mean"):
        assert results[f"core/{case}"] == ("known bug", "token_mean")


def test_the_command_runs_eqx_loss_itself_without_an_adapter(capsys):
    assert conformance.main(["--tier", "core"]) == 0
    assert "19 pass" in capsys.readouterr().out
    assert conformance.main(["--tier", "none"]) == 2
