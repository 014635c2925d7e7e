"""The NumPy forward against Hugging Face's models; needs torch."""

import dataclasses

import harness
import numpy as np
import pytest
import reference

from specjax.models.config import from_huggingface

torch = pytest.importorskip("torch", reason="the models of transformers need torch (extra bench)")
transformers = pytest.importorskip("transformers", reason="needs transformers (extra test)")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LENGTH = 40


def rope(kind, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0} | fields}


EXTENDED = {"factor": 4.0, "original_max_position_embeddings": 16}
LLAMA = {
    "default": {},
    "theta": rope("default") | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=4.0),  # up to its original length, here 64
    "dynamic-original": rope("dynamic", factor=4.0, original_max_position_embeddings=16),  # which does not count
    "llama3": rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **EXTENDED),
    "yarn": rope("yarn", **EXTENDED),
    "yarn-mscale": rope("yarn", mscale=1.5, mscale_all_dim=0.5, beta_fast=8.0, beta_slow=0.5, **EXTENDED),
    "yarn-attention-factor": rope("yarn", attention_factor=1.25, truncate=False, **EXTENDED),
    "wide-heads": {"head_dim": 16},
    "one-kv-head": {"num_key_value_heads": 1},
    "all-biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu"},
    "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
}
OTHERS = {
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window-in-upper-layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}
SCALINGS = ("linear", "dynamic", "llama3", "yarn", "yarn-mscale", "yarn-attention-factor")
CASES = {name: ("Llama", options) for name, options in LLAMA.items()} | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_logits(name):
    family, options = CASES[name]
    source = getattr(transformers, f"{family}Config")(**SIZES | options)
    config = from_huggingface(source.to_dict())
    params = harness.tiny_params(3, config)
    tokens = np.random.default_rng(0).integers(0, 61, LENGTH)
    right = huggingface_logits(family, source, params, tokens)
    logits = reference.forward(params, config, tokens)
    np.testing.assert_allclose(logits, right, atol=1e-5 * np.abs(right).max())


def test_every_option_of_these_cases_matters():
    """A tolerance that hid an option would pass the cases above: each one moves the logits of the plain model."""
    tokens = np.random.default_rng(0).integers(0, 61, LENGTH)
    plain = from_huggingface(transformers.LlamaConfig(**SIZES).to_dict())
    params = harness.tiny_params(3, plain)
    base = reference.forward(params, plain, tokens)
    for name in (
        "theta",
        "linear",
        "llama3",
        "yarn",
        "yarn-mscale",
        "yarn-attention-factor",
        "gelu",
        "gelu-tanh",
        "relu",
    ):
        config = from_huggingface(transformers.LlamaConfig(**SIZES | LLAMA[name]).to_dict())
        assert np.abs(reference.forward(params, config, tokens) - base).max() > 1e-3 * np.abs(base).max(), name
    window = dataclasses.replace(plain, sliding_windows=(None, 5))
    assert np.abs(reference.forward(params, window, tokens) - base).max() > 1e-3 * np.abs(base).max()


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_inverse_frequencies(name, head_dim):
    """At lengths beyond the original one too, where dynamic scaling grows its base."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    source = transformers.LlamaConfig(**SIZES | LLAMA[name] | {"head_dim": head_dim})
    config = from_huggingface(source.to_dict())
    for length in (64, 65, 1000):
        right, magnitude = ROPE_INIT_FUNCTIONS[config.rope.scaling](source, "cpu", seq_len=length)
        np.testing.assert_allclose(reference.inverse_frequencies(config.rope, head_dim, length), right, rtol=1e-5)
        assert reference.rope_magnitude(config.rope) == pytest.approx(magnitude, rel=1e-12)


def huggingface_logits(family, source, params, tokens):
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(source, attn_implementation="eager").eval()
    tensors = {name: torch.tensor(tensor) for name, tensor in harness.to_huggingface_state_dict(params).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"} if source.tie_word_embeddings else not missing
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].double().numpy()
