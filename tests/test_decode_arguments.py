"""What the decoder refuses before it traces anything."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from harness import HistoryModel, ScriptedDrafter, history_params, tiny_config, tiny_params
from jax.sharding import PartitionSpec as P

import specjax
from specjax import DecodeConfig, Greedy, Params, compiled, sampling_params
from specjax.models.config import RopeConfig

HISTORY, TARGET, V = HistoryModel(vocab_size=11), history_params(7), 11


@pytest.mark.parametrize("windows", [(), (0,), (3,), (0, 2), (0, 2, 1, 3), (0, 0, 3), (1, 3), (0, 3, 4), (-1, 0, 3)])
def test_windows_must_ascend_from_zero_to_k(windows):
    with pytest.raises(ValueError, match="windows ascending from 0 to num_speculative_tokens = 3"):
        DecodeConfig(target=HISTORY, drafter=ScriptedDrafter(num_tokens=3), windows=windows)


def test_prefill_chunk_must_be_positive():
    with pytest.raises(ValueError, match="prefill_chunk >= 1, got 0"):
        DecodeConfig(target=HISTORY, prefill_chunk=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": jax.random.key_data(jax.random.key(0))}, "typed key"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, r"key of shape \[2\]"),
        ({"key": 0}, "key to be an array .*, got int"),
        ({"prompt": [[1, 2], [3, 4]]}, "prompt to be an array .*, got list"),
        ({"prompt": jnp.zeros((2, 4))}, "integer prompts"),
        ({"prompt": jnp.zeros(4, jnp.int32)}, "integer prompts"),
        ({"prompt": jnp.array([[1, 2, 3, V], [1, 2, 3, 4]])}, "prompt ids in 0..10, got 1..11"),
        ({"prompt": jnp.array([[1, 2, -1, 0], [1, 2, 3, 4]])}, "prompt ids in 0..10, got -1"),
        ({"prompt_length": jnp.array([4])}, r"prompt_length of shape \[2\]"),
        ({"prompt_length": jnp.array([4, 5])}, "prompt_length in 0..4"),
        ({"prompt_length": jnp.array([4, -1])}, "prompt_length in 0..4"),
        ({"sampling": sampling_params(3, max_tokens=2)}, r"temperature of shape \[2\]"),
        (
            {"sampling": sampling_params(2, max_tokens=2).replace(top_k=jnp.zeros(3))},
            r"top_k of shape \[2\], .*, got \[3\]",
        ),
        (
            {"sampling": sampling_params(2, max_tokens=2).replace(stop_token_ids=jnp.zeros((1, 4)))},
            r"stop_token_ids of",
        ),
        ({"sampling": sampling_params(2, max_tokens=2, logit_bias=jnp.zeros(V + 1))}, r"logit_bias of shape \[2, 11\]"),
        ({"sampling": sampling_params(2, max_tokens=2, temperature=0.5)}, "temperature 0 with the greedy verifier"),
        ({"max_new_tokens": -1}, "max_new_tokens >= 0"),
        ({"sampling": sampling_params(2, max_tokens=9), "max_new_tokens": 9}, "12 positions, got 13"),
    ],
)
@pytest.mark.parametrize("function", [specjax.generate, specjax.prefill, specjax.autoregressive, specjax.stream])
def test_arguments_are_checked_before_tracing(function, changes, message):
    target = HistoryModel(vocab_size=V, max_positions=12)
    data = {"key": jax.random.key(0), "prompt": jnp.ones((2, 4), jnp.int32), "prompt_length": jnp.array([4, 2])}
    data |= {"sampling": sampling_params(2, max_tokens=2), "max_new_tokens": 2} | changes
    if function is specjax.autoregressive and "greedy" in message:
        return
    with pytest.raises(ValueError, match=message):
        list(function(Params(target=TARGET), **data, config=DecodeConfig(target=target, verifier=Greedy())))


def test_an_early_exit_from_another_target_is_refused():
    """Layers alike, rotations not: its drafts would be guesses of a model that nobody trained."""
    target, other = (specjax.Transformer(tiny_config(rope=RopeConfig(theta=theta))) for theta in (1e4, 5.0))
    drafter = specjax.EarlyExitDrafter(target=other, exit_layer=1, num_tokens=2)
    config = DecodeConfig(target=target, drafter=drafter)
    prompt, length, sampling = jnp.ones((1, 2), jnp.int32), jnp.array([2]), sampling_params(1, max_tokens=2)
    with pytest.raises(ValueError, match="early exit from the decoder's own target"):
        specjax.generate(
            Params(target=tiny_params()), jax.random.key(0), prompt, length, sampling, config=config, max_new_tokens=2
        )


SHORT = jax.random.key(0), jnp.ones((1, 2), jnp.int32), jnp.array([2]), sampling_params(1, max_tokens=2)
"""A prompt of two tokens: key, prompt, length and sampling."""
AXIS = specjax.Transformer(tiny_config(), axis="model")
WHOLE = dataclasses.replace(AXIS, axis=None)


@pytest.mark.parametrize(
    "config",
    [
        DecodeConfig(target=AXIS),
        DecodeConfig(target=AXIS, drafter=specjax.EarlyExitDrafter(target=AXIS, exit_layer=1, num_tokens=2)),
        DecodeConfig(target=WHOLE, drafter=specjax.ModelDrafter(model=AXIS, num_tokens=2, vocab_size=9)),
        DecodeConfig(
            target=WHOLE, drafter=specjax.ModelDrafter(model=WHOLE, num_tokens=2, vocab_size=61, axis="model")
        ),
    ],
)
def test_a_config_for_a_mesh_is_refused_on_one_device(config):
    params = Params(target=tiny_params(), draft=tiny_params())
    for function in (specjax.generate, specjax.prefill):
        with pytest.raises(ValueError, match=r"expected models without a mesh axis .*, got the axis 'model'"):
            function(params, *SHORT, config=config, max_new_tokens=2)


def test_inside_a_map_over_its_axis_it_is_not():
    """A user's own map; one device is a mesh too, on which nothing is cut."""
    params, mesh = Params(target=tiny_params()), jax.make_mesh((1,), ("model",))

    def decode(*arguments):
        return specjax.generate(*arguments, config=DecodeConfig(target=AXIS), max_new_tokens=2).tokens

    run = jax.shard_map(decode, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert jax.eval_shape(run, params, *SHORT).shape == (1, 2)


def test_an_early_exit_that_is_cut_otherwise_than_its_target_is_refused():
    config = DecodeConfig(target=WHOLE, drafter=specjax.EarlyExitDrafter(target=AXIS, exit_layer=1, num_tokens=2))
    with pytest.raises(ValueError, match="early exit from the decoder's own target"):
        compiled.check_arguments(*SHORT, config=config, max_new_tokens=2)


@dataclasses.dataclass(frozen=True)
class Careless(specjax.NGramDrafter):
    """Counts its tokens in float32."""

    def draft(self, *arguments):
        draft, state = super().draft(*arguments)
        return draft.replace(length=draft.length.astype(jnp.float32)), state


@dataclasses.dataclass(frozen=True)
class Graded(specjax.NGramDrafter):
    """Its grades are no integers, which no grade would be equal to."""

    def draft(self, *arguments):
        draft, state = super().draft(*arguments)
        return draft.replace(evidence=draft.length + 0.5), state


@dataclasses.dataclass(frozen=True)
class Narrow(HistoryModel):
    """Leaves the last id out of its logits."""

    def apply(self, *arguments):
        output, cache = super().apply(*arguments)
        return output.replace(logits=output.logits[..., :-1]), cache


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"drafter": Careless(num_tokens=2)}, ValueError, "integer tokens .* got tokens int32.* length float32"),
        ({"drafter": Graded(num_tokens=2)}, ValueError, r"evidence \(1,\) or None, .* evidence float32\(1,\)"),
        ({"target": Narrow(vocab_size=V)}, AssertionError, r"shape \(1, 1, 10\).* expected"),
    ],
)
def test_what_models_and_drafters_return_is_checked(changes, error, message):
    config = DecodeConfig(**{"target": HISTORY} | changes)
    prompt, length, sampling = jnp.ones((1, 2), jnp.int32), jnp.array([2]), sampling_params(1, max_tokens=2)
    with pytest.raises(error, match=message):
        specjax.generate(
            Params(target=TARGET), jax.random.key(0), prompt, length, sampling, config=config, max_new_tokens=2
        )
