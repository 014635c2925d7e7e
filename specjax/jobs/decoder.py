"""What completes prompts: a target with its drafter, rules and vocabulary."""

import dataclasses

import jax

from specjax.compiled import bucket
from specjax.decode import DecodeConfig, without_speculation
from specjax.io.tokenizer import Tokenizer
from specjax.jobs.model import LoadedModel, load_model
from specjax.jobs.settings import Sampling, Settings
from specjax.parallel.drivers import SINGLE_DEVICE, Driver
from specjax.parallel.mesh import MODEL
from specjax.types import DecodeState, Pace, Params, SamplingParams

Rows = tuple[jax.Array, jax.Array, jax.Array]
"""Keys `[B]`, prompts `[B, P]` and prompt lengths `[B]`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decoder:
    """Everything that a completion needs beside its prompt."""

    params: Params
    config: DecodeConfig
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    sampling: Sampling
    measured_pace: bool = False
    """Rows speculate only where it pays, by step times that are measured first; otherwise always."""
    driver: Driver = SINGLE_DEVICE
    """What runs it; `params` are as its `place` returns them."""


def build_decoder(settings: Settings, driver: Driver = SINGLE_DEVICE, *, target: LoadedModel | None = None) -> Decoder:
    """Loads what the settings name.

    Args:
      settings: models and rules.
      driver: where the models go and what runs them.
      target: the target that they name, if it has been loaded already, for the same driver.

    Raises:
      ValueError: a model that cannot be loaded, or a drafter that does not fit it.
    """
    if target is None:
        axis = None if driver.mesh is None else MODEL
        target = load_model(settings.model, dtype=settings.dtype, mesh=driver.mesh, axis=axis)
    drafter, draft_params = settings.drafter.build(target, settings.dtype)
    config = DecodeConfig(target=target.model, drafter=drafter, verifier=settings.verifier, log_probs=settings.logprobs)
    return Decoder(
        params=driver.place(Params(target=target.params, draft=draft_params), config),
        config=config,
        tokenizer=target.tokenizer,
        eos_ids=target.eos_ids,
        sampling=settings.sampling,
        measured_pace=settings.effective_pace == "measured",
        driver=driver,
    )


def plain_decoder(decoder: Decoder) -> Decoder:
    """The same without speculation: the baseline of a comparison."""
    params, config = dataclasses.replace(decoder.params, draft=None), without_speculation(decoder.config)
    return dataclasses.replace(decoder, params=params, config=config, measured_pace=False)


def begin(decoder: Decoder, rows: Rows, sampling: SamplingParams, pace: Pace | None) -> DecodeState:
    """Prefills a batch, with room for outputs of the bucket that `max_new_tokens` falls in."""
    width = bucket(decoder.sampling.max_new_tokens)
    return decoder.driver.prefill(decoder.params, *rows, sampling, pace, config=decoder.config, max_new_tokens=width)
