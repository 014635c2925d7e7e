import itertools
import json
import random
import unicodedata

import numpy as np
import pytest
from vocabularies import (
    CONTROL,
    NASTY,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    byte_level_metadata,
    byte_pieces,
    sentencepiece_metadata,
    spell,
    write_gguf,
)

from specjax.io.gguf_tokenizer import backend_from_gguf, special_tokens_from_gguf
from specjax.io.tokenizer import load_tokenizer

TEXT = "We'LL it's 12345  ok\n\n x\t!?'é 1$$7"
SPLITS = {  # derived by hand from the published patterns; words are parted by "·"
    "gpt-2": "We·'·LL· it·'s· 12345· · ok·\n\n· x·\t·!?'·é· 1·$$·7",
    "smollm": "We·'·LL· it·'s· ·1·2·3·4·5· · ok·\n\n· x·\t·!?'·é· ·1·$$·7",
    "llama-bpe": "We·'LL· it·'s· ·123·45· · ok·\n\n· x·\t·!?'·é· ·1·$$·7",
    "qwen2": "We·'LL· it·'s· ·1·2·3·4·5· · ok·\n\n· x·\t·!?'·é· ·1·$$·7",
    "default": "We·'·LL· it·'·s· ·123·45· · ok·\n\n· x·\t·!?'·é· ·1·$$·7",
}
SCORES = {
    "▁": -9.0,
    "a": -10.0,
    "b": -11.0,
    "ab": -3.0,
    "▁a": -2.0,
    "ba": -4.0,
    "aa": -5.0,
    "▁ab": -1.0,
    "abab": -6.0,
    "aaa": -7.0,
    "▁▁": -8.0,
}


def split(backend, text):
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", SPLITS)
def test_words_are_cut_by_the_published_rule(pre):
    backend = backend_from_gguf(byte_level_metadata(pre=pre))
    assert split(backend, TEXT) == [spell(word) for word in SPLITS[pre].split("·")]


def test_default_rule_cuts_numbers_in_threes_and_spaces_apart():
    backend = backend_from_gguf(byte_level_metadata(pre="default"))
    assert split(backend, "12345678") == ["123", "456", "78"]
    assert split(backend, "٣٤٥٦") == [spell("٣٤٥٦")]


@pytest.mark.parametrize(
    ("pre", "same"), [("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2")]
)
def test_other_names_of_a_rule(pre, same):
    backends = [backend_from_gguf(byte_level_metadata(pre=name)) for name in (pre, same)]
    assert backends[0].to_str() == backends[1].to_str()


def test_merges_apply_inside_words_only():
    backend = backend_from_gguf(byte_level_metadata(" ab", "ab", "1 a", pre="gpt-2"))
    assert backend.encode("ab ab1 a").tokens == ["ab", "Ġab", "1", "Ġa"]


def test_whole_words_win_over_merges_in_llama3_vocabularies_only():
    metadata = byte_level_metadata("ab", "bc", pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"].insert(258, "abc")  # no merge leads to it
    metadata["tokenizer.ggml.token_type"] = np.array([NORMAL] * 259 + [CONTROL], np.int32)
    assert backend_from_gguf(metadata).encode("abc").tokens == ["abc"]
    assert backend_from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("abc").tokens == ["ab", "c"]


def test_qwen_composes_characters():
    ids = {pre: backend_from_gguf(byte_level_metadata(pre=pre)).encode("e\u0301").ids for pre in ("qwen2", "gpt-2")}
    assert ids == {"qwen2": [*"é".encode()], "gpt-2": [*"e\u0301".encode()]}


@pytest.mark.parametrize(
    ("settings", "framed"),
    [
        ({"pre": "gpt-2"}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "gpt-2", "add_bos_token": True}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_bos_follows_the_file_and_then_the_kind(settings, framed):
    metadata = byte_level_metadata(special=("<eos>", "<bos>")) | {"tokenizer.ggml.bos_token_id": 257}
    backend = backend_from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in settings.items()})
    assert backend.encode("A").ids == [257] * framed + [0x41]
    assert backend.encode("A", add_special_tokens=False).ids == [0x41]


def test_eos_is_added_where_the_file_says_so():
    backend = backend_from_gguf(byte_level_metadata() | {"tokenizer.ggml.add_eos_token": True})
    assert backend.encode("A").ids == [0x41, 256]


def test_control_and_user_defined_pieces_are_never_cut():
    metadata = byte_level_metadata(special=("<eos>", "<think>", "<|深 x|>"))
    metadata["tokenizer.ggml.token_type"][257] = USER_DEFINED
    backend = backend_from_gguf(metadata)
    assert backend.encode("a<think>b<|深 x|>").ids == [0x61, 257, 0x62, 258]
    special = {i: token.special for i, token in backend.get_added_tokens_decoder().items()}
    assert special == {256: True, 257: False, 258: True}


def test_unused_pieces_at_the_end_have_no_id():
    metadata = byte_level_metadata(special=("<eos>", "[PAD1]", "[PAD2]"))
    metadata["tokenizer.ggml.token_type"][-2:] = UNUSED
    backend = backend_from_gguf(metadata)
    assert backend.get_vocab_size() == 257
    assert backend.id_to_token(257) is None


def byte_names(text):
    return [f"<0x{byte:02X}>" for byte in text.encode()]


def merge_by_score(text, scores):
    """SentencePiece's own way: again and again the neighbours whose union scores best, the leftmost of equals."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        unions = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not unions:
            return [part for piece in pieces for part in ([piece] if piece in scores else byte_names(piece))]
        at = -max(unions)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_sentencepiece_merges_by_score():
    backend, generator = backend_from_gguf(sentencepiece_metadata(SCORES)), random.Random(0)
    for _ in range(2000):
        text = "".join(generator.choice("aab é") for _ in range(generator.randrange(1, 14)))
        assert backend.encode(text).tokens == ["<s>", *merge_by_score(" " + text, SCORES)]


def test_equal_scores_merge_from_the_left():
    scores = dict.fromkeys(["▁", "▁▁", "▁▁▁", "▁▁▁▁▁"], -1e9) | {"a": -1.0}
    backend = backend_from_gguf(sentencepiece_metadata(scores))
    for length in range(1, 12):
        text = "a" + " " * length + "a"
        assert backend.encode(text).tokens == ["<s>", *merge_by_score(" " + text, scores)]


def test_sentencepiece_without_a_first_space():
    metadata = sentencepiece_metadata(SCORES) | {"tokenizer.ggml.add_space_prefix": False}
    backend = backend_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False})
    assert backend.encode("ab ab").tokens == ["ab", "▁ab"]
    assert backend.decode(backend.encode(" ab").ids) == " ab"


def test_sentencepiece_control_pieces_come_from_no_merge():
    scores = SCORES | {"<": -12.0, "s": -13.0, ">": -14.0, "<s": -15.0}
    backend = backend_from_gguf(sentencepiece_metadata(scores))
    merges = json.loads(backend.to_str())["model"]["merges"]
    assert ["<", "s"] in merges
    assert ["<s", ">"] not in merges


@pytest.mark.parametrize("text", NASTY)
def test_sentencepiece_text_comes_back(tmp_path, text):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", sentencepiece_metadata(SCORES)))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_reads_the_same_files(tmp_path):
    pytest.importorskip("torch", reason="transformers reads GGUF files only where torch is (extra bench)")
    import transformers

    write_gguf(tmp_path / "bpe.gguf", byte_level_metadata("ab", " a", " 漢", "12", "'LL", pre="qwen2"))
    write_gguf(tmp_path / "spm.gguf", sentencepiece_metadata(SCORES))
    for name in ("bpe.gguf", "spm.gguf"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=name)
        ours = load_tokenizer(tmp_path / name)
        for text in ["ab ab 12 1 漢 WE'LL", *NASTY]:
            ids = ours.encode(text)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            # Two published rules are missing there: a first space before a space, and composed characters.
            if not text.startswith(" ") and unicodedata.is_normalized("NFC", text):
                assert ids == theirs.encode(text), (name, text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'gpt2' or 'llama', got 't5'"),
        ({"tokenizer.ggml.model": None}, "'gpt2' or 'llama', got None"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre to be one of .*, got 'tekken'"),
        ({"tokenizer.ggml.pre": None}, "got None"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens to be an array of strings, got None"),
        ({"tokenizer.ggml.tokens": np.zeros(3)}, "got ndarray of length 3"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges to be an array of strings"),
        ({"tokenizer.ggml.merges": ["a z z"]}, "merges of two pieces"),
        ({"tokenizer.ggml.merges": ["漢 字"]}, "merges of two pieces of the vocabulary: .*漢"),
        ({"tokenizer.ggml.token_type": np.ones(3, np.int32)}, "257 numbers, one per token, got ndarray of length 3"),
        ({"tokenizer.ggml.eos_token_id": 257}, "id of eos_token to be below 257, got 257"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "id of eos_token to be below 257, got 'x'"),
        ({"tokenizer.ggml.tokens": [*byte_pieces()[:256], "a"]}, "every piece once, got 'a' as ids 97 and 256"),
    ],
)
def test_contradictions_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        backend_from_gguf(byte_level_metadata("ab"[:1]) | changes)


def test_scores_and_piece_lengths_are_checked():
    metadata = sentencepiece_metadata(SCORES)
    with pytest.raises(ValueError, match="scores to hold 270 numbers"):
        backend_from_gguf(metadata | {"tokenizer.ggml.scores": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="at most 1024 characters, got one of 2000"):
        backend_from_gguf(sentencepiece_metadata(SCORES | {"a" * 2000: -20.0}))


def test_special_tokens_have_the_names_of_templates():
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert special_tokens_from_gguf(sentencepiece_metadata(SCORES)) == names
