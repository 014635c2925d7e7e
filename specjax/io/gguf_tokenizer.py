"""The tokenizer that a GGUF file carries in its metadata."""

import dataclasses
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from specjax.io.backend import WORD_BOUNDARY, frame_with

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_LONGEST_PIECE = 1024
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclasses.dataclass(frozen=True)
class _ByteLevelKind:
    """What `tokenizer.ggml.pre` stands for."""

    split: Callable[[], list[Any]]
    """The pre-tokenizers that cut a text into words; they end in bytes."""
    normalizer: Callable[[], Any] | None = None
    whole_words: bool = False
    """A word that is itself a piece is never cut, whatever the merges say."""
    adds_bos: bool = False


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False)]


def _smollm() -> list[Any]:
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _by_patterns(*patterns: str) -> Callable[[], list[Any]]:
    def split() -> list[Any]:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]

    return split


def _modern_pattern(digits: str) -> str:
    """The splitting pattern that Llama 3 and Qwen 2 share but for the length of a run of digits."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    return rf"{contractions}|{words}|\s*[\r\n]+|\s+(?!\S)|\s+"


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = _ByteLevelKind(_by_patterns(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"))
_LLAMA3 = _ByteLevelKind(_by_patterns(_modern_pattern(r"\p{N}{1,3}")), whole_words=True, adds_bos=True)
_QWEN2 = _ByteLevelKind(_by_patterns(_modern_pattern(r"\p{N}")), normalizer=normalizers.NFC)
_BYTE_LEVEL_KINDS = {
    "default": _DEFAULT,
    "gpt-2": _ByteLevelKind(_gpt2),
    "smollm": _ByteLevelKind(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def backend_from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the tokenizer that GGUF metadata describes.

    Byte-level BPE (`tokenizer.ggml.model` "gpt2") cuts words by the published rule that `tokenizer.ggml.pre` names.
    SentencePiece ("llama") merges by score, falls back to bytes, and puts a space before the text and after each
    special token. Trailing pieces marked unused are padding: they get no id here, hence no text.

    Args:
      metadata: the `metadata` of `read_header`.

    Raises:
      ValueError: an unknown kind of tokenizer, or a vocabulary that contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level(metadata)
    elif kind == "llama":
        backend = _sentencepiece(metadata)
    else:
        raise ValueError(
            f"expected tokenizer.ggml.model to be 'gpt2' or 'llama', got {kind!r}: load the tokenizer from a directory "
            "with a tokenizer.json instead"
        )
    _add_special_pieces(backend, metadata)
    special = special_tokens_from_gguf(metadata)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or _byte_level_kind(metadata).adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    frame_with(backend, special.get("bos_token") if adds_bos else None, special.get("eos_token") if adds_eos else None)
    return backend


def special_tokens_from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens that the file names, under the names that chat templates use.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    tokens = _tokens(metadata)
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _SPECIAL_TOKENS.items()}
    for name, token_id in ids.items():
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < len(tokens)):
            raise ValueError(f"expected the id of {name} to be below {len(tokens)}, got {token_id!r}")
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    return _strings(metadata, "tokenizer.ggml.tokens")


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise ValueError(f"expected {key} to be an array of strings, got {_shape(values)}: the tokenizer is incomplete")
    return values


def _shape(values: Any) -> str:
    """A short description of a metadata value for error messages."""
    return f"{type(values).__name__} of length {len(values)}" if isinstance(values, Sized) else repr(values)


def _types(metadata: Mapping[str, Any]) -> list[int]:
    return _per_token(metadata, "tokenizer.ggml.token_type")


def _per_token(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """A numeric array with one entry per token."""
    values, count = metadata.get(key), len(_tokens(metadata))
    if not isinstance(values, np.ndarray) or len(values) != count:
        raise ValueError(f"expected {key} to hold {count} numbers, one per token, got {_shape(values)}")
    return values.tolist()


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids by piece, without the unused pieces at the end."""
    tokens, types = _tokens(metadata), _types(metadata)
    count = len(tokens)
    while count and types[count - 1] == _UNUSED:
        count -= 1
    vocabulary = {token: token_id for token_id, token in enumerate(tokens[:count])}
    if len(vocabulary) < count:
        first, token = next((i, token) for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise ValueError(f"expected every piece once, got {token!r} as ids {first} and {vocabulary[token]}")
    return vocabulary


def _add_special_pieces(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Marks control pieces and the unknown piece as special, and user-defined ones as never cut."""
    pieces = list(zip(_tokens(metadata), _types(metadata), strict=True))
    control = [
        AddedToken(piece, special=True, normalized=False) for piece, kind in pieces if kind in (_UNKNOWN, _CONTROL)
    ]
    whole = [AddedToken(piece, special=False, normalized=False) for piece, kind in pieces if kind == _USER_DEFINED]
    backend.add_special_tokens(control)
    backend.add_tokens(whole)


def _byte_level_kind(metadata: Mapping[str, Any]) -> _ByteLevelKind:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _BYTE_LEVEL_KINDS:
        raise ValueError(
            f"expected tokenizer.ggml.pre to be one of {sorted(_BYTE_LEVEL_KINDS)}, got {name!r}: load the tokenizer "
            "from a directory with a tokenizer.json instead"
        )
    return _BYTE_LEVEL_KINDS[name]


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    kind = _byte_level_kind(metadata)
    merges = [tuple(merge.split(" ")) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    backend = _tokenizer(_vocabulary(metadata), merges, ignore_merges=kind.whole_words)
    if kind.normalizer:
        backend.normalizer = kind.normalizer()
    backend.pre_tokenizer = pre_tokenizers.Sequence(kind.split())
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocabulary, spaced = _vocabulary(metadata), metadata.get("tokenizer.ggml.add_space_prefix", True)
    merges = _merges_by_score(metadata, vocabulary)
    unknown = special_tokens_from_gguf(metadata).get("unk_token")
    backend = _tokenizer(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    boundary = [normalizers.Prepend(WORD_BOUNDARY)] if spaced else []
    backend.normalizer = normalizers.Sequence([*boundary, normalizers.Replace(" ", WORD_BOUNDARY)])
    strip = [decoders.Strip(content=" ", left=1)] if spaced else []
    steps = [decoders.Replace(WORD_BOUNDARY, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _tokenizer(vocabulary: dict[str, int], merges: list[Any], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises a bare Exception for a merge outside the vocabulary
        raise ValueError(f"expected merges of two pieces of the vocabulary: {error}") from error


def _merges_by_score(metadata: Mapping[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: every way to join two pieces into a third, best score first."""
    scores, types = _per_token(metadata, "tokenizer.ggml.scores"), _types(metadata)
    apart = (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    joined = {piece: scores[i] for piece, i in vocabulary.items() if types[i] not in apart}
    longest = max(map(len, joined), default=0)
    if longest > _LONGEST_PIECE:
        raise ValueError(f"expected pieces of at most {_LONGEST_PIECE} characters, got one of {longest}")
    merges = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in joined.items()
        for cut in range(1, len(piece))
        if piece[:cut] in joined and piece[cut:] in joined
    ]
    merges.sort(key=lambda merge: merge[:2])
    return [merge[2:] for merge in merges]
