"""The settings that the case tests share: equal configs and shapes are one compiled program for all of them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import decoding
import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Script, ScriptedDrafter, TableModel, script_of

from specjax.decode import DecodeConfig
from specjax.models.transformer import Transformer
from specjax.sampling import sampling_params
from specjax.types import Output, SamplingParams
from specjax.verify import Block, ExactMatch, Greedy, Rejection

BATCH, WIDTH, NEW = 8, 16, 32
"""Rows, prompt columns and new tokens of every program."""
VOCAB, WINDOW = 16, 5
"""Of the table model, and of the drafters in front of it."""
TABLE = TableModel(vocab_size=VOCAB)
TINY = Transformer(harness.tiny_config())
VERIFIERS = (Greedy(), ExactMatch(), Rejection(), Block())


def table_config(drafter: Any = None, verifier: Any = None) -> DecodeConfig:
    """The table model with a scripted drafter and `ExactMatch`, or others."""
    drafter = ScriptedDrafter(num_tokens=WINDOW) if drafter is None else drafter
    return DecodeConfig(target=TABLE, drafter=drafter, verifier=ExactMatch() if verifier is None else verifier)


def run(
    config: DecodeConfig,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] | int = 0,
    pace: Any = None,
    plain: bool = False,
    **sampling: Any,
) -> Output:
    """`generate` (`plain`: `autoregressive`) for at most 8 prompts; the other rows are padding."""
    arguments = *inputs(prompts, seeds), sampling_rows(len(prompts), **sampling)
    if plain:
        return decoding.autoregressive(params, *arguments, config=config, max_new_tokens=NEW)
    return decoding.generate(params, *arguments, pace, config=config, max_new_tokens=NEW)


def inputs(prompts: Sequence[Sequence[int]], seeds: Sequence[int] | int = 0) -> tuple[jax.Array, Any, Any]:
    """Row keys, prompts and their lengths; row r has the key of seed `seeds[r]`, or of `seeds + r`."""
    tokens, length = np.zeros((BATCH, WIDTH), np.int32), np.zeros(BATCH, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], length[row] = prompt, len(prompt)
    rows = np.arange(BATCH) + seeds if isinstance(seeds, int) else np.resize(seeds, BATCH)
    return jax.vmap(jax.random.key)(rows), jnp.asarray(tokens), jnp.asarray(length)


def sampling_rows(count: int, **values: Any) -> SamplingParams:
    """`sampling_params` for the whole batch; a list holds one value for each of the first `count` rows."""
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    filled = {name: [*value, *[value[-1]] * (BATCH - count)] for name, value in lists.items()}
    return sampling_params(BATCH, **{"max_tokens": NEW} | values | filled)


def script(texts: Sequence[Sequence[int]], window: int, *, length: Any = None) -> Script:
    """Proposes that each row goes on as in its text (prompt included), `window` tokens at a time and id 0 at its end.

    `length` `[B or 1, N]`, if given, says how many of them when the text so far has n tokens.
    """
    padded = np.zeros((BATCH, WIDTH + NEW), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text[: WIDTH + NEW]
    whole = script_of(jnp.asarray(padded), window)
    return (
        whole
        if length is None
        else whole.replace(length=jnp.broadcast_to(jnp.asarray(length, jnp.int32), padded.shape))
    )


def rows(output: Output) -> list[list[int]]:
    """The output tokens of each row."""
    return [tokens[:length].tolist() for tokens, length in zip(np.asarray(output.tokens), output.length, strict=True)]


def follow(table: Any, token: int, count: int = NEW) -> list[int]:
    """The greedy path of a table from `token` on, without it."""
    path = [token]
    for _ in range(count):
        path.append(int(np.argmax(np.asarray(table)[path[-1]])))
    return path[1:]


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the programs compiled inside the block."""
    compiled_programs: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled_programs.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled_programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
