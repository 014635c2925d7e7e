"""The jitted decoder: the one place that says what is static and what is donated, and that checks arguments first."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from specjax import decode
from specjax.decode import DecodeConfig
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.model import ModelDrafter
from specjax.models.transformer import Transformer
from specjax.pace import GRADES
from specjax.slots import Slots
from specjax.slots import insert as insert_rows
from specjax.types import DecodeState, Draft, FinishReason, Output, Pace, Params, SamplingParams
from specjax.verify import ExactMatch, Greedy

_generate = jax.jit(decode.generate, static_argnames=("config", "max_new_tokens"))
_prefill = jax.jit(decode.prefill, static_argnames=("config", "max_new_tokens"))
_decode_steps = jax.jit(decode.decode_steps, static_argnames=("config",), donate_argnames=("state",))
_insert = jax.jit(insert_rows, static_argnames=("pad_id",), donate_argnames=("slots",))
_draft_step = jax.jit(decode.draft_step, static_argnames=("config",), donate_argnames=("state",))
_verify_step = jax.jit(decode.verify_step, static_argnames=("config",), donate_argnames=("state",))
_output = jax.jit(decode.output, static_argnames=("max_new_tokens",))

BUCKETS = tuple(step << power for power in range(3, 19) for step in (2, 3))
"""Widths that prompts and outputs are padded to: 16, 24, 32, 48, 64, ... One compiled program for each in use."""


def bucket(length: int) -> int:
    """Smallest bucket that holds `length` tokens.

    Raises:
      ValueError: the length is beyond the largest bucket.
    """
    for size in BUCKETS:
        if length <= size:
            return size
    raise ValueError(f"expected at most {BUCKETS[-1]} tokens, got {length}")


def pad_prompts(prompts: Sequence[Sequence[int]], *, pad_id: int = 0) -> tuple[jax.Array, jax.Array]:
    """Right-pads token lists to one bucket: `[B, P]` int32 and lengths `[B]` int32.

    Raises:
      ValueError: no prompts, an empty one, or what is no id.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"expected prompts of at least one token, got lengths {lengths}")
    width = bucket(max(lengths))
    rows = np.full((len(prompts), width), pad_id, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise ValueError(f"expected token ids, integers from 0 to 2**31 - 1, got {prompt!r:.80}")
        row[: len(prompt)] = ids
    return jnp.asarray(rows), jnp.asarray(np.array(lengths, np.int32))


def generate(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> Output:
    """Generates up to `max_new_tokens` tokens a row with the target's exact law: `decode.generate`, jitted.

    A new B, P, `max_new_tokens` or `config` compiles; other lengths, keys and parameters do not.

    Args:
      params: weights of the target and, where it has any, of the drafter.
      key: a typed key, from which row r gets `fold_in(key, r)`, or `[B]` typed keys, one per row and no two alike.
      prompt: `[B, P]` int32, right-padded: `pad_prompts` makes it.
      prompt_length: `[B]` int32, at least 1 (0 marks a padding row, which yields nothing).
      sampling: the rows' parameters: `sampling_params` makes them.
      pace: costs by which rows decide together how many drafted tokens pay: `make_pace`; None always speculates.
      config: models and rules.
      max_new_tokens: columns of the output.

    Returns:
      Tokens, lengths, finish reasons and counters of each row.

    Raises:
      ValueError: arguments that could not give a right result.
    """
    check_arguments(key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)
    _check_axes(config)
    return _generate(params, key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)


def prefill(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> DecodeState:
    """Reads the prompts, for `decode_steps` to go on from: `decode.prefill`, jitted. Arguments as for `generate`.

    Raises:
      ValueError: arguments that could not give a right result.
    """
    check_arguments(key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)
    _check_axes(config)
    return _prefill(params, key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)


def autoregressive(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> Output:
    """Plain decoding, one token a step: `decode.autoregressive`, jitted. Arguments as for `generate`.

    Raises:
      ValueError: arguments that could not give a right result.
    """
    plain = decode.without_speculation(config)
    return generate(params, key, prompt, prompt_length, sampling, config=plain, max_new_tokens=max_new_tokens)


def decode_steps(
    params: Params,
    state: DecodeState,
    sampling: SamplingParams,
    num_steps: int = 2**31 - 1,
    least_running: int = 1,
    *,
    config: DecodeConfig,
) -> DecodeState:
    """Runs up to `num_steps` steps, while `least_running` rows run: `decode.decode_steps`, jitted.

    One program serves every number of steps. The state passed in is donated: its buffers live on in the one returned.

    `sampling` is what `prefill` was given and checked: looking at its values here would wait for the device.
    """
    return _decode_steps(params, state, sampling, jnp.int32(num_steps), jnp.int32(least_running), config=config)


def decode_step(params: Params, state: DecodeState, sampling: SamplingParams, *, config: DecodeConfig) -> DecodeState:
    """Drafts, judges and commits once, by the program of `decode_steps`; the state passed in is donated."""
    return decode_steps(params, state, sampling, 1, config=config)


def insert(slots: Slots, rows: Slots, slot: int, *, config: DecodeConfig) -> Slots:
    """`slots.insert`, jitted; one program serves every `slot`.

    The slots passed in are donated, the rows are not.

    Raises:
      ValueError: rows that do not fit into the slots, in number or in length.
    """
    (most, width), (count, length) = (part.state.context.tokens.shape for part in (slots, rows))
    if not 0 <= slot <= most - count or length > width:
        raise ValueError(
            f"expected at most {width} columns and rows within {most} slots, got {length} and {count} from slot {slot}"
        )
    return _insert(slots, rows, jnp.int32(slot), pad_id=config.pad_id)


def draft_step(
    params: Params, state: DecodeState, sampling: SamplingParams, *, config: DecodeConfig
) -> tuple[DecodeState, Draft]:
    """The first half of a step, which drafts: `decode.draft_step`, jitted; the state passed in is donated."""
    return _draft_step(params, state, sampling, config=config)


def verify_step(
    params: Params, state: DecodeState, draft: Draft, sampling: SamplingParams, *, config: DecodeConfig
) -> DecodeState:
    """The second half, which judges and commits: `decode.verify_step`, jitted; the state passed in is donated."""
    return _verify_step(params, state, draft, sampling, config=config)


def stream(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> Iterator[Output]:
    """Yields the rows so far after each step: the same steps as `generate`, its arguments, and its tokens.

    Closing the iterator stops decoding.
    """
    state = prefill(params, key, prompt, prompt_length, sampling, pace, config=config, max_new_tokens=max_new_tokens)
    return _steps(params, state, sampling, config=config, max_new_tokens=max_new_tokens)


def _steps(
    params: Params, state: DecodeState, sampling: SamplingParams, *, config: DecodeConfig, max_new_tokens: int
) -> Iterator[Output]:
    while (np.asarray(state.finish_reason) == FinishReason.RUNNING).any():
        state = decode_steps(params, state, sampling, 1, config=config)
        yield _output(state, max_new_tokens=max_new_tokens)


def check_arguments(
    key: jax.Array,
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    pace: Pace | None = None,
    *,
    config: DecodeConfig,
    max_new_tokens: int,
) -> None:
    """Refuses what could not give a right result; values are looked at only where they are not being traced.

    Raises:
      ValueError: says what was expected and what came.
    """
    for name, value in {"key": key, "prompt": prompt, "prompt_length": prompt_length}.items():
        if not isinstance(value, jax.Array | np.ndarray):
            raise ValueError(
                f"expected {name} to be an array (jax.random.key, pad_prompts), got {type(value).__name__}"
            )
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"expected a typed key (jax.random.key), got {key.dtype}{list(key.shape)}")
    if prompt.ndim != 2 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"expected integer prompts [B, P], got {prompt.dtype}{list(prompt.shape)}")
    batch, width = prompt.shape
    if not batch or not width:
        raise ValueError(f"expected at least one prompt of at least one column, got [{batch}, {width}]")
    if not jnp.issubdtype(prompt_length.dtype, jnp.integer):
        raise ValueError(f"expected integer prompt_length, got {prompt_length.dtype}")
    for name, rows in ({"prompt_length": prompt_length} | ({"key": key} if key.ndim else {})).items():
        _check_rows(name, rows, (batch,))
    if max_new_tokens < 0:
        raise ValueError(f"expected max_new_tokens >= 0, got {max_new_tokens}")
    _check_widths(batch, sampling, pace, config)
    _check_drafter(config)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((prompt, prompt_length, sampling, pace))):
        _check_values(prompt, prompt_length, sampling, config, max_new_tokens, width)
        paced = pace is not None and not isinstance(config.verifier, Greedy | ExactMatch)
        if paced and key.ndim and batch > 1 and not isinstance(key, Tracer):
            _check_keys(key, (np.asarray(prompt_length) > 0) & (np.asarray(sampling.temperature) > 0))


def model_axes(config: DecodeConfig) -> set[str]:
    """Mesh axes that the decoder's models are cut over, or share work over; empty: every model is whole."""
    drafter, parts = config.drafter, [config.target, config.drafter]
    parts += [drafter.model] if isinstance(drafter, ModelDrafter) else []
    parts += [drafter.target] if isinstance(drafter, EarlyExitDrafter) else []
    axes = {part.axis for part in parts if isinstance(part, Transformer | ModelDrafter)}
    return {axis for axis in axes if axis is not None}


def _check_axes(config: DecodeConfig) -> None:
    """Refuses a config for a mesh, but inside a map over its axes."""
    for axis in model_axes(config):
        try:
            lax.axis_size(axis)
        except NameError as error:
            raise ValueError(
                f"expected models without a mesh axis on a single device, got the axis {axis!r}: use a driver of "
                "specjax.parallel, or specjax.parallel.specs.on_mesh(config, target=None)"
            ) from error


def _check_widths(batch: int, sampling: SamplingParams, pace: Pace | None, config: DecodeConfig) -> None:
    vocab_size, windows = config.target.vocab_size, len(config.window_sizes)
    wider = {"logit_bias": (vocab_size,), "stop_token_ids": sampling.stop_token_ids.shape[1:]}
    for field in dataclasses.fields(sampling):
        if (rows := getattr(sampling, field.name)) is not None:
            _check_rows(f"sampling.{field.name}", rows, (batch, *wider.get(field.name, ())))
    if pace is not None and (pace.acceptance.shape, pace.costs.shape) != ((batch, GRADES), (windows, 2)):
        raise ValueError(
            f"expected a pace for {batch} rows and {windows} windows (make_pace), "
            f"got acceptance {list(pace.acceptance.shape)} and costs {list(pace.costs.shape)}"
        )


def _check_rows(name: str, rows: jax.Array, shape: tuple[int, ...]) -> None:
    if rows.shape != shape:
        raise ValueError(f"expected {name} of shape {list(shape)}, one per prompt, got {list(rows.shape)}")


def _check_drafter(config: DecodeConfig) -> None:
    if not isinstance(config.drafter, EarlyExitDrafter):
        return
    target, own = config.target, config.drafter.target
    if not isinstance(target, Transformer) or (target.config, target.axis) != (own.config, own.axis):
        raise ValueError(
            "expected an early exit from the decoder's own target, got one from another: give DecodeConfig and "
            "EarlyExitDrafter the same Transformer"
        )


def _check_keys(key: jax.Array, sampled: np.ndarray) -> None:
    """Rows that share coins, and decide together when to speculate, would decide by what they are yet to draw."""
    with jax.ensure_compile_time_eval():
        data = np.asarray(jax.random.key_data(key))[sampled]
    if len(np.unique(data, axis=0)) < len(data):
        raise ValueError(
            "expected keys of which no two are alike, for rows that are sampled with a pace, got some twice: split or "
            "fold them"
        )


def _check_values(
    prompt: jax.Array,
    prompt_length: jax.Array,
    sampling: SamplingParams,
    config: DecodeConfig,
    max_new_tokens: int,
    width: int,
) -> None:
    lengths, budget = np.asarray(prompt_length), np.minimum(np.asarray(sampling.max_tokens), max_new_tokens)
    if (lengths < 0).any() or (lengths > width).any():
        raise ValueError(f"expected prompt_length in 0..{width}, got {lengths.tolist()}")
    longest = int((lengths + budget).max(initial=0))
    if longest > config.target.max_positions:
        raise ValueError(
            f"expected prompt and new tokens within the target's {config.target.max_positions} positions, "
            f"got {longest}: shorten the prompt or lower max_tokens"
        )
    ids = np.asarray(prompt)[np.arange(width) < lengths[:, None]]
    if ids.size and (ids.min() < 0 or ids.max() >= config.target.vocab_size):
        raise ValueError(f"expected prompt ids in 0..{config.target.vocab_size - 1}, got {ids.min()}..{ids.max()}")
    bias, stops = sampling.logit_bias, np.asarray(sampling.stop_token_ids)
    if bias is not None and not np.isfinite(np.asarray(bias).max(axis=-1)).all():
        raise ValueError(
            "expected logit_bias with numbers below +inf and an id left in each row; logit_bias() builds one"
        )
    if (stops >= config.target.vocab_size).any():
        raise ValueError(f"expected stop_token_ids below {config.target.vocab_size}, got {int(stops.max())}")
    if isinstance(config.verifier, Greedy) and (np.asarray(sampling.temperature) > 0).any():
        raise ValueError(
            "expected temperature 0 with the greedy verifier; to sample use rejection, block or exact_match"
        )
