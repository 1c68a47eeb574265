"""The Hugging Face side of `bench.model`: loads a folder, then times one forward and backward for every line it reads.

Runs in an environment with torch and transformers, by itself: `PYTHON bench/model_reference.py FOLDER`.
"""

import json
import sys
import time

import numpy as np
import torch
import transformers


def main() -> None:
    """One line of JSON about itself, then seconds for every line of the input."""
    folder = sys.argv[1]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    tokens = torch.from_numpy(np.load(f"{folder}/tokens.npy")).long()

    def run() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return float(loss)

    loss = run()
    facts = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "attention": model.config._attn_implementation,
        "experts": model.config._experts_implementation,
        "loss": loss,
    }
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
