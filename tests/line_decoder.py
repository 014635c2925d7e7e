"""A decoder whose model writes one line round and round, so that its texts are known."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import TableModel
from vocabularies import byte_tokenizer

from specjax.decode import DecodeConfig
from specjax.drafters.ngram import NGramDrafter
from specjax.jobs.decoder import Decoder
from specjax.jobs.prompts import Prompt, encode_prompts
from specjax.jobs.settings import Sampling
from specjax.types import Params, Verifier
from specjax.verify import ExactMatch

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_ids[0]
WINDOW = 4
LINE = "0123abcdefghij"
KNOWN = LINE + "0"
"""A prompt from which the n-gram drafter proposes the text that follows, 1 2 3 a, and then b c d e."""
MODEL = TableModel(vocab_size=257, max_positions=64)


def table(*, sharpness: float = 50.0) -> jax.Array:
    """Logits of a model that writes LINE round and round: each of its characters has one successor."""
    logits = np.random.default_rng(0).normal(size=(257, 257)).astype(np.float32)
    for one, next_one in itertools.pairwise(LINE + LINE[0]):
        logits[ord(one), ord(next_one)] += sharpness
    return jnp.asarray(logits)


def decoder_of(
    *,
    sharpness: float = 50.0,
    measured_pace: bool = False,
    verifier: Verifier | None = None,
    log_probs: bool = True,
    **sampling: Any,
) -> Decoder:
    """The decoder, with n-gram drafts of 4 tokens and, unless told otherwise, 12 new tokens."""
    config = DecodeConfig(
        target=MODEL,
        drafter=NGramDrafter(num_tokens=WINDOW),
        verifier=ExactMatch() if verifier is None else verifier,
        log_probs=log_probs,
    )
    return Decoder(
        params=Params(target=table(sharpness=sharpness)),
        config=config,
        tokenizer=TOKENIZER,
        eos_ids=(EOS,),
        sampling=Sampling(**{"max_new_tokens": 12} | sampling),
        measured_pace=measured_pace,
    )


def prompts_of(*texts: str) -> list[Prompt]:
    """Encoded prompts with the ids 0, 1, 2, ..."""
    return encode_prompts(TOKENIZER, [Prompt(id=index, content=text) for index, text in enumerate(texts)])
