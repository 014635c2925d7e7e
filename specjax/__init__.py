"""Lossless speculative decoding in JAX."""

from specjax.compiled import autoregressive, bucket, decode_steps, generate, pad_prompts, prefill, stream
from specjax.decode import DecodeConfig, decode_step
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
    "generate",
    "init_params",
    "logit_bias",
    "make_pace",
    "pad_prompts",
    "param_shapes",
    "prefill",
    "sampling_params",
    "stream",
]
