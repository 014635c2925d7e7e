"""What tests of jobs and scripts share: a tiny model on disk, and programs that compile quickly."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import decoding
import numpy as np
import pytest
from checkpoint_writers import huggingface_config, huggingface_tensors, random_params, tiny, write_huggingface
from vocabularies import byte_tokenizer

from specjax import compiled, decode
from specjax.io.tokenizer import save_tokenizer
from specjax.jobs import replay
from specjax.slots import insert

EOS, USER = 256, 257
VOCAB = 260
_INSERT = decoding.fast_jit(insert, static_argnames=("pad_id",), donate_argnames=("slots",))
_READ = decoding.fast_jit(replay._read.__wrapped__, static_argnames=("target", "width"), donate_argnames=("cache",))
_DEVIATION, _PLACES, _UNFILTERED = (
    decoding.fast_jit(program.__wrapped__) for program in (replay._deviation, replay._places, replay._unfiltered)
)
_DRAFT = decoding.fast_jit(decode.draft_step, static_argnames=("config",), donate_argnames=("state",))
_VERIFY = decoding.fast_jit(decode.verify_step, static_argnames=("config",), donate_argnames=("state",))
TEMPLATE = "{% for message in messages %}<user>{{ message.content }}{% endfor %}"


TEXTS = ["abab", "b", "abab", "naïve café", "c" * 14, "abcabcabc", "ba", "cc", "a", "bcbcb"]
"""Prompts of a job. Two are equal."""
NEW = 8
"""Tokens that each of its rows gets."""


def named(texts: Sequence[str] = TEXTS) -> list[dict[str, Any]]:
    """Rows of these prompts, with ids of their own."""
    return [{"id": f"row {index}", "prompt": text} for index, text in enumerate(texts)]


def write_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a model of random weights with a liking for printable ASCII, its tokenizer of bytes and a chat template.

    `changes` are to its architecture.
    """
    config = tiny(vocab_size=VOCAB, **changes)
    params = random_params(config, seed)
    printable = np.isin(np.arange(VOCAB), np.arange(32, 127))[:, None]
    params = params | {"unembed": params["unembed"] * printable}
    write_huggingface(directory, huggingface_config(config), huggingface_tensors(params))
    save_tokenizer(byte_tokenizer(special=("<eos>", "<user>"), chat_template=TEMPLATE), directory)
    return directory


@contextlib.contextmanager
def quick_programs() -> Iterator[None]:
    """The library's programs, unoptimised: compiling them is most of what such tests cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_generate", decoding.generate)
        patch.setattr(compiled, "_prefill", decoding.begin)
        patch.setattr(compiled, "_decode_steps", decoding.decode_steps)
        patch.setattr(compiled, "_insert", _INSERT)
        patch.setattr(compiled, "_draft_step", _DRAFT)
        patch.setattr(compiled, "_verify_step", _VERIFY)
        patch.setattr(replay, "_read", _READ)
        patch.setattr(replay, "_deviation", _DEVIATION)
        patch.setattr(replay, "_places", _PLACES)
        patch.setattr(replay, "_unfiltered", _UNFILTERED)
        yield
