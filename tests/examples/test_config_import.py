"""`python -m train.config import`: what carries over, what is listed, and that the result loads."""

import pytest
import yaml

from train.config import main

MEGATRON = r"""#!/bin/bash
# a comment with --not-a-flag 3
SEQ=8192
LR=${LR:-3.39e-4}
MODEL_ARGS=(
  --num-layers 24 --hidden-size 1536 \
  --ffn-hidden-size 4608 --num-attention-heads 16 --kv-channels 128
  --multi-latent-attention --q-lora-rank 256 --kv-lora-rank 512
  --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --layer-group-size 4 --gated-attention-proj-granularity head_wise
  --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm
  --norm-epsilon 1e-6 --rotary-base 10000 --position-embedding-type rope
  --vocab-size 157184 --make-vocab-size-divisible-by 128
  --disable-bias-linear --no-kda-lora --kda-safe-gate --kda-lower-bound -5.0
)
MOE_ARGS=(--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 512
  --moe-shared-expert-intermediate-size 512 --moe-router-num-groups 8 --moe-router-group-topk 4
  --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.001 --bias-zero-mean-update
  --moe-z-loss-coeff 2.9e-6 --moe-router-load-balancing-type none --moe-router-dtype fp32
  --moe-layer-freq "([0]*1+[1]*23)")
torchrun pretrain_gpt.py "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" \
  --seq-length $SEQ --micro-batch-size=1 --global-batch-size 16 --train-iters 1000 --seed 42 \
  --lr $LR --min-lr 3.39e-4 --lr-decay-style constant --lr-warmup-iters 250 --clip-grad 1.0 \
  --optimizer muon --muon-momentum 0.95 --muon-matched-adamw-rms 0.2 --adam-beta1 0.9 --adam-beta2 0.95 \
  --weight-decay 0.1 --weight-decay-norm-params --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 \
  --no-calculate-per-token-loss --eod-mask-loss --reset-attention-mask --bf16 --enable-qkclip \
  --attention-max-qkscores 100 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 1
"""
MAXTEXT = """\
decoder_block: "ling3"
base_num_decoder_layers: 24
inhomogeneous_layer_cycle_interval: 4
first_num_dense_layers: 1
base_emb_dim: 1536
base_mlp_dim: 4608
base_num_query_heads: 16
base_num_kv_heads: 16
head_dim: 128
vocab_size: 157184
mlp_activations: ["silu", "linear"]
attention_type: mla
q_lora_rank: 256
kv_lora_rank: 512
qk_nope_head_dim: 128
qk_rope_head_dim: 64
v_head_dim: 128
mla_gated_attention_type: head_wise
use_qk_norm: true
num_experts: 128
num_experts_per_tok: 8
base_moe_mlp_dim: 512
shared_experts: 1
moe_shared_expert_dim: 512
n_routing_groups: 8
topk_routing_group: 4
routed_scaling_factor: 2.5
routed_score_func: sigmoid
routed_bias: true
routed_bias_update_rate: 0.001
routed_bias_zero_mean_update: true
norm_topk_prob: false
moe_z_loss_weight: 2.9e-6
calculate_per_token_loss: false
mtp_num_layers: 1
mtp_per_layer_loss_norm: true
mtp_loss_scaling_factor: 0.1
normalization_layer_epsilon: 1.0e-6
rope_max_timescale: 10000
logits_via_embedding: false
kda_lower_bound: -5.0
use_kda_lora: false
use_kda_safe_gate: true
use_qk_clip: true
qk_clip_threshold: 100
max_target_length: 8192
per_device_batch_size: 2
ici_fsdp_parallelism: 8
eod_mask_loss: true
reset_attention_mask: true
steps: 1000
init_weights_seed: 42
opt_type: muon
muon_beta: 0.95
muon_consistent_rms: 0.2
muon_weight_decay_norm_params: true
adam_b1: 0.9
adam_b2: 0.95
adam_weight_decay: 0.1
gradient_clipping_threshold: 1.0
learning_rate: 3.39e-4
lr_schedule_type: constant
warmup_steps_fraction: 0.25
dtype: bfloat16
float32_logits: true
"""


@pytest.fixture
def convert(tmp_path, capsys):
    def run(source, text):
        path = tmp_path / "foreign"
        path.write_text(text)
        output = tmp_path / "ours.yaml"
        code = main(["import", "--from", source, str(path), "-o", str(output)])
        text = output.read_text() if output.exists() else ""
        return code, yaml.safe_load(text) if text else None, text, capsys.readouterr().err

    return run


def test_a_megatron_script_and_a_maxtext_file_of_one_model_give_one_configuration(convert):
    """Both describe Ling-3 tiny; what they agree on must come out the same."""
    from_megatron, from_maxtext = convert("megatron", MEGATRON), convert("maxtext", MAXTEXT)
    assert [from_megatron[0], from_maxtext[0]] == [0, 0], (from_megatron[3], from_maxtext[3])
    megatron, maxtext = from_megatron[1], from_maxtext[1]
    assert megatron["model"].pop("record_max_logits") is True
    for ours in (megatron, maxtext):
        ours["model"].pop("record_max_logits", None)
        ours["model"]["mla"].pop("rope_interleaved", None)
        # Written only where the source says it; the defaults here are the same.
        assert ours["model"]["moe"].pop("norm_topk_prob", True) is True
        ours["optimizer"]["schedule"].pop("total_steps", None)
        ours["optimizer"]["schedule"].pop("final", None)
    assert megatron["model"] == maxtext["model"]
    assert megatron["optimizer"] == maxtext["optimizer"]
    assert megatron["batch"] == maxtext["batch"]
    assert maxtext["loss"].pop("mtp_per_layer_loss_norm") is True
    assert megatron["loss"].pop("micro_batch_size") == 1
    assert megatron["loss"] == maxtext["loss"]


def test_the_imported_file_is_the_shipped_configuration_of_that_model(convert):
    """configs/ling3-tiny.yaml was written by hand from the same public sources."""
    import pathlib

    shipped = yaml.safe_load((pathlib.Path(__file__).parents[2] / "configs" / "ling3-tiny.yaml").read_text())
    imported = convert("maxtext", MAXTEXT)[1]
    for section in ("loss", "batch", "data"):
        for key, value in shipped[section].items():
            found = imported[section].get(key, 1 if key == "micro_batch_size" else None)
            assert float(found) == float(value), key
    for key in ("mla", "kda", "mtp"):
        for name, value in shipped["model"][key].items():
            assert imported["model"][key].get(name, 4) == value, name
    for name, value in shipped["model"]["moe"].items():
        assert imported["model"]["moe"][name] == value, name
    assert (
        imported["optimizer"]["schedule"]["warmup_steps"] == shipped["optimizer"]["schedule"]["warmup_steps"]
    )


def test_what_cannot_be_honoured_is_listed_in_file_and_on_stderr(convert):
    code, _, text, err = convert("megatron", MEGATRON)
    assert code == 0
    for output in (text, err):
        assert "pipeline_model_parallel_size=2: there is no pipeline axis" in output
        assert "reset_attention_mask=True: no counterpart" in output
    assert "not_a_flag" not in err
    assert err.count("not honoured:") == 2


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("--fp16", "fp16=True: compute dtypes"),
        ("--normalization LayerNorm", "normalization=LayerNorm: norms are RMSNorm"),
        ("--optimizer sgd", "optimizer=sgd: optimizers are"),
        ("--lr-decay-style inverse-square-root", "schedules are"),
        ("--moe-layer-freq 2", "dense layers must come first"),
        ("--train-iters many", "train_iters=many"),
        ("--hidden-dropout 0.1", "there is no dropout"),
        ("--some-new-flag", "some_new_flag=True: no counterpart"),
    ],
)
def test_values_that_cannot_be_expressed_are_listed_with_the_reason(convert, extra, says):
    assert says in convert("megatron", MEGATRON + "\npython train.py " + extra)[3]


def test_megatron_yaml_is_read_like_flags(convert):
    text = "model:\n  num-layers: 2\n  hidden-size: 64\ntraining:\n  train_iters: 5\n  calculate_per_token_loss: true\n"
    code, tree, _, err = convert("megatron", text)
    assert tree["model"]["num_layers"] == 2
    assert tree["run"]["num_steps"] == 5
    assert tree["loss"]["calculate_per_token_loss"] is True
    assert code == 1  # sizes are missing
    assert "incomplete" in err


def test_maxtext_arguments_are_read_like_yaml(convert):
    text = "python -m MaxText.train base.yml steps=7 calculate_per_token_loss=true dtype=float32 weird=1"
    code, tree, _, err = convert("maxtext", text)
    assert tree["run"]["num_steps"] == 7
    assert tree["loss"]["calculate_per_token_loss"] is True
    assert "weird=1: no counterpart" in err
    assert code == 1


def test_rows_need_the_number_of_devices(convert):
    assert "number of devices" in convert("maxtext", MAXTEXT.replace("ici_fsdp_parallelism: 8", ""))[3]
    assert convert("maxtext", MAXTEXT)[1]["batch"]["num_rows"] == 16
    steps = MAXTEXT + "gradient_accumulation_steps: 4\n"
    assert convert("maxtext", steps)[1]["batch"]["num_rows"] == 64


@pytest.mark.parametrize(
    ("source", "text"), [("megatron", "nothing here"), ("maxtext", "- a\n- list\n"), ("maxtext", "")]
)
def test_files_without_settings_are_refused(convert, source, text):
    code, tree, _, err = convert(source, text)
    assert (code, tree) == (2, None)
    assert "must hold" in err


@pytest.mark.parametrize("text", ["a: [1, 2\nb: {", 'pretrain.py --num-layers "24 --lr 1e-4'])
def test_broken_yaml_and_an_open_quotation_are_refused(convert, text):
    code, tree, _, err = convert("megatron", text)
    assert (code, tree) == (2, None)
    assert "neither a command line nor YAML" in err


def test_an_infinite_size_is_listed_not_a_crash(convert):
    assert "not honoured: base_emb_dim=1e999" in convert("maxtext", MAXTEXT + "base_emb_dim: 1e999\n")[3]


def test_an_output_that_cannot_be_written_is_a_usage_error(tmp_path, capsys):
    source = tmp_path / "model.yml"
    source.write_text(MAXTEXT)
    assert main(["import", "--from", "maxtext", str(source), "-o", str(tmp_path / "no" / "x.yaml")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_a_missing_file_is_a_usage_error(capsys):
    assert main(["import", "--from", "maxtext", "/no/such/file"]) == 2
    assert main(["import", "--from", "other", "/no/such/file"]) == 2
    assert main([]) == 2
    capsys.readouterr()
