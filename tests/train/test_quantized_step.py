"""8-bit products in a step: scales are those of tokens and columns, so a mesh changes nothing but roundings."""

import importlib.util

import numpy as np
import pytest

from .step_cases import GradientCase, mesh_of, relative_rms, tiny_config


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="needs the extra `quantize`")
def test_the_gradient_of_a_quantized_model_does_not_depend_on_the_mesh():
    config = tiny_config(quantization="int8", num_layers=1, first_k_dense_replace=0, mtp=None)
    want_grads, want = GradientCase(mesh_of(), model_config=config)(False)
    grads, got = GradientCase(mesh_of(fsdp=2, expert=4), model_config=config)(False)
    # A last bit moves one number by a step of 1/127 here and there; measured 6e-4. Without quantization: 8e-2.
    assert relative_rms(grads, want_grads) < 5e-3
    # The objective is a mean over tokens: such steps average out.
    np.testing.assert_allclose(got.output.objective.total, want.output.objective.total, rtol=1e-5)
    np.testing.assert_array_equal(got.counts, want.counts)
