"""Hugging Face Trainer: any normalization through `compute_loss_func`, under accumulation.

The Trainer hands `compute_loss_func` the labels of one micro-step and `num_items_in_batch` of the
whole step, multiplies by the number of processes (undoing DDP's mean) and does not divide by the
micro-steps. So a row needs its weight from the whole step: the data collator cannot know it, but
"sample" only needs the number of rows of the step, and "token" is what the Trainer does already.

`LossRows` counts rows instead of tokens; everything else is the Trainer's.
"""

import tempfile

import numpy as np
import torch
import transformers

from eqx_loss.numpy import token_weights

ROWS, POSITIONS, VOCAB, MICRO_STEPS = 8, 6, 32, 4


def per_sample_loss(outputs, labels, num_items_in_batch=None):
    """Mean over the step's rows of each row's token mean; `num_items_in_batch` must count rows."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]  # position t predicts t + 1
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none", ignore_index=-100
    )
    weights = (
        token_weights((targets != -100).cpu().numpy(), "sample") * len(labels) / float(num_items_in_batch)
    )
    return torch.sum(losses * torch.from_numpy(weights).to(losses).flatten())


class LossRows(transformers.Trainer):
    """A Trainer whose `num_items_in_batch` is the number of rows of the step."""

    def _get_num_items_in_batch(self, batch_samples, device):
        rows = torch.tensor(sum(len(batch["labels"]) for batch in batch_samples), device=device)
        return self.accelerator.gather(rows).sum() if self.args.average_tokens_across_devices else rows


def make_rows():
    generator = np.random.default_rng(0)
    rows = []
    for length in (6, 2, 3, 1, 5, 2, 4, 6):  # the row of length 1 has no target
        tokens = generator.integers(0, VOCAB, POSITIONS)
        labels = np.where(np.arange(POSITIONS) < length, tokens, -100)
        rows.append({"input_ids": torch.tensor(tokens), "labels": torch.tensor(labels)})
    return rows


def main():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    rows = make_rows()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    expected = per_sample_loss(model(input_ids=batch["input_ids"]), batch["labels"], ROWS)
    wanted = torch.autograd.grad(expected, model.transformer.wte.weight)[0]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=ROWS // MICRO_STEPS, gradient_accumulation_steps=MICRO_STEPS,
            max_steps=1, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
            use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        before = model.transformer.wte.weight.detach().clone()
        trainer = LossRows(model, arguments, train_dataset=rows, compute_loss_func=per_sample_loss)
        trainer.train()
    found = before - model.transformer.wte.weight.detach()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    print(f"per-sample loss {expected:.4f}; the Trainer's step is its gradient")


if __name__ == "__main__":
    main()
