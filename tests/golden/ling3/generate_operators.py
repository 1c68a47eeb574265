"""Writes fresh files of the KDA operator with the stock Hugging Face recurrence, in float64.

    python tests/golden/ling3/generate_operators.py OUT

Runs where `generate.py` does.
"""

import sys
from pathlib import Path

import torch
from generate import Float64Torch
from safetensors.torch import save_file
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as modeling

# name -> (rows, positions, heads, key dim, value dim, kind of gate, initial state)
CASES = {
    "wide_values": (2, 65, 2, 4, 12, "mild", True),
    "narrow_values": (1, 33, 3, 12, 4, "mild", True),
    "zero_and_minus_60": (1, 200, 2, 8, 8, "mixed", False),
    "never_forgets": (1, 128, 1, 8, 8, "zero", True),
    "one_position": (3, 1, 2, 8, 6, "mild", True),
    "chunk_and_one": (1, 65, 1, 6, 6, "saturated", False),
    "tiny_gates": (1, 130, 2, 8, 8, "tiny", True),
}


def make_gate(kind, shape):
    """Log-decays of a kind, at most 0."""
    match kind:
        case "mild":
            return -torch.rand(shape, dtype=torch.float64) * 3
        case "mixed":
            return torch.where(torch.rand(shape, dtype=torch.float64) < 0.5, 0.0, -60.0).double()
        case "zero":
            return torch.zeros(shape, dtype=torch.float64)
        case "saturated":
            return torch.full(shape, -5.0, dtype=torch.float64)
        case "tiny":
            return -torch.rand(shape, dtype=torch.float64) * 1e-6


def write_case(file, rows, length, heads, key_dim, value_dim, kind, has_state):
    """One file: inputs, results, and the gradient of the probed sum."""
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float32).double()  # noqa: E731
    inputs = {
        "q": draw(rows, length, heads, key_dim),
        "k": draw(rows, length, heads, key_dim),
        "v": draw(rows, length, heads, value_dim),
        "g": make_gate(kind, (rows, length, heads, key_dim)),
        "beta": torch.rand(rows, length, heads, dtype=torch.float64),
    }
    if has_state:
        inputs["s0"] = draw(rows, heads, key_dim, value_dim)
    for tensor in inputs.values():
        tensor.requires_grad_()
    o, s1 = modeling.recurrent_kimi_delta_attention(
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=inputs.get("s0"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    probe = lambda x: torch.sin(torch.arange(1, x.numel() + 1, dtype=torch.float64)).reshape(x.shape)  # noqa: E731
    ((o * probe(o)).sum() + (s1 * probe(s1)).sum()).backward()
    tensors = {name: x.detach() for name, x in inputs.items()} | {"o": o.detach(), "s1": s1.detach()}
    tensors |= {f"d{name}": x.grad for name, x in inputs.items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, file)


def main():
    """Write every file."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(number)
        write_case(out / f"kda_{name}.safetensors", *case)
        print("wrote", name)


if __name__ == "__main__":
    modeling.torch = Float64Torch("torch")
    main()
