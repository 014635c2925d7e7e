"""Small vocabularies for tests: byte-level, SentencePiece, and the GGUF files that carry them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specjax.io.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
NASTY = [
    "",
    " ",
    "   three  spaces   ",
    "tab\t\ttab\n\n\r\nlines \n",
    "1234567 3.14 ٣٤ Ⅷ ½",
    "if (x == 0) {\n        return x->y[i++]; // 100%\n}",
    "it's WE'LL I'VE you'd",
    "naïve façade e\u0301 a\u0308\u0323",
    "漢字かなカナ 한국어 ไทย عربى",
    "👩‍👩‍👧 👍🏽 🇫🇷",
    "zero\u200bwidth no\u00a0break wide\u3000space",
    "<eos> in the middle<eos>",
    "\ufffd \x00 \x7f",
]


def byte_pieces() -> list[str]:
    """The 256 characters of the byte-level alphabet, in the order of the bytes they stand for."""
    shifted = iter(range(256, 512))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def spell(text: str) -> str:
    """A text in the byte-level alphabet."""
    return "".join(byte_pieces()[byte] for byte in text.encode())


def byte_vocabulary(*words: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Bytes as ids 0..255, then the words and the prefixes that lead to them, with their merges."""
    pieces, merges = byte_pieces(), []
    for word in map(spell, words):
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return {piece: i for i, piece in enumerate(pieces)}, merges


def byte_tokenizer(*words: str, special: tuple[str, ...] = ("<eos>",), **fields: Any) -> Tokenizer:
    """A byte-level tokenizer: the bytes, the words with their prefixes, then the special tokens."""
    vocabulary, merges = byte_vocabulary(*words)
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    eos = {"eos_token": special[0]} if special else {}
    ids = tuple(backend.token_to_id(text) for text in eos.values())
    return Tokenizer(**{"backend": backend, "special_tokens": eos, "eos_ids": ids} | fields)


def byte_level_metadata(*words: str, pre: str = "gpt-2", special: tuple[str, ...] = ("<eos>",)) -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary; the first special token is the EOS."""
    vocabulary, merges = byte_vocabulary(*words)
    types = [NORMAL] * len(vocabulary) + [CONTROL] * len(special)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*vocabulary, *special],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": len(vocabulary),
    }


def sentencepiece_metadata(scores: dict[str, float]) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece vocabulary: <unk>, <s>, </s>, the bytes, then scored pieces."""
    control = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    types = control | {f"<0x{byte:02X}>": BYTE for byte in range(256)} | dict.fromkeys(scores, NORMAL)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(types),
        "tokenizer.ggml.token_type": np.array(list(types.values()), np.int32),
        "tokenizer.ggml.scores": np.array([scores.get(piece, 0.0) for piece in types], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """Writes a GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        _add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list | np.ndarray):
        writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif key != "general.architecture":
        writer.add_string(key, value)
