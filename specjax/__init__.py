"""Lossless speculative decoding in JAX. What decodes is jitted here; `specjax.decode` has the same un-jitted."""

from specjax.compiled import (
    autoregressive,
    bucket,
    decode_step,
    decode_steps,
    draft_step,
    generate,
    pad_prompts,
    prefill,
    stream,
    verify_step,
)
from specjax.decode import DecodeConfig
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGramDrafter
from specjax.drafters.none import NoDrafter
from specjax.models.config import RopeConfig, TransformerConfig
from specjax.models.params import init_params, param_shapes
from specjax.models.transformer import Transformer
from specjax.pace import make_pace
from specjax.sampling import logit_bias, sampling_params
from specjax.types import (
    Context,
    DecodeState,
    DecodeStats,
    Draft,
    Drafter,
    FinishReason,
    KVCache,
    LanguageModel,
    LogProbs,
    ModelOutput,
    Output,
    Pace,
    Params,
    SamplingParams,
    Verdict,
    Verifier,
)
from specjax.verify import Block, ExactMatch, Greedy, Rejection

__all__ = [
    "Block",
    "Context",
    "DecodeConfig",
    "DecodeState",
    "DecodeStats",
    "Draft",
    "Drafter",
    "EarlyExitDrafter",
    "ExactMatch",
    "FinishReason",
    "Greedy",
    "KVCache",
    "LanguageModel",
    "LogProbs",
    "ModelDrafter",
    "ModelOutput",
    "NGramDrafter",
    "NoDrafter",
    "Output",
    "Pace",
    "Params",
    "Rejection",
    "RopeConfig",
    "SamplingParams",
    "Transformer",
    "TransformerConfig",
    "Verdict",
    "Verifier",
    "autoregressive",
    "bucket",
    "decode_step",
    "decode_steps",
    "draft_step",
    "generate",
    "init_params",
    "logit_bias",
    "make_pace",
    "pad_prompts",
    "param_shapes",
    "prefill",
    "sampling_params",
    "stream",
    "verify_step",
]
