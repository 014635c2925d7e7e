import json
import subprocess
import sys

import numpy as np
import pytest
from vocabularies import (
    NASTY,
    UNUSED,
    byte_level_metadata,
    byte_tokenizer,
    sentencepiece_metadata,
    spell,
    write_gguf,
)

from specjax.io.backend import frame_with
from specjax.io.gguf_tokenizer import backend_from_gguf
from specjax.io.tokenizer import Tokenizer, check_same_vocabulary, encode_prompt, load_tokenizer, save_tokenizer

TEMPLATE = """\
{% for m in messages %}{{ '[' + m.role + ']' + m.content + eos_token }}{% endfor %}
{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
SCORES = {"▁": -3.0, "a": -4.0, "▁a": -1.0}


def write_directory(path, tokenizer, **files):
    """A Hugging Face directory with this tokenizer's `tokenizer.json` and the given files."""
    path.mkdir(exist_ok=True)
    tokenizer.backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        suffix = ".jinja" if isinstance(content, str) else ".json"
        (path / (name + suffix)).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def ids_of(text):
    return list(text.encode())


# ---- Loading ----


@pytest.mark.parametrize("text", NASTY)
def test_text_round_trip_and_transformers_agree(tmp_path, text):
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer("漢字", " th", "if", "  ", chat_template=TEMPLATE)
    save_tokenizer(tokenizer, tmp_path)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level_metadata("ab", " a", pre="smollm")
        | {"tokenizer.chat_template": TEMPLATE, "tokenizer.ggml.eot_token_id": 5},
        byte_level_metadata("ab", special=("<eos>", "<bos>"), pre="llama-bpe") | {"tokenizer.ggml.bos_token_id": 258},
        sentencepiece_metadata(SCORES) | {"tokenizer.ggml.padding_token_id": 2},
    ],
)
def test_saved_tokenizer_is_the_same(tmp_path, metadata):
    first = load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))
    save_tokenizer(first, tmp_path / "saved" / "here")
    second = load_tokenizer(tmp_path / "saved" / "here")
    assert second.backend.to_str() == first.backend.to_str()
    for name in ("special_tokens", "eos_ids", "bos_id", "pad_id", "chat_template", "piece_rule", "vocab_size"):
        assert getattr(second, name) == getattr(first, name), name
    check_same_vocabulary(first, second)


def test_gguf_file_says_what_ends_a_text(tmp_path):
    metadata = byte_level_metadata("ab", special=("<eos>", "<eot>", "<pad>"))
    eos = metadata["tokenizer.ggml.eos_token_id"]
    named = {"eot": eos + 1, "eom": eos, "padding": eos + 2}
    metadata |= {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in named.items()}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.pad_id) == ((eos, eos + 1), None, eos + 2)
    assert tokenizer.vocab_size == eos + 3


def test_directory_settings(tmp_path):
    tokenizer = byte_tokenizer(special=("<eos>", "<bos>", "<eot>"))
    path = write_directory(
        tmp_path,
        tokenizer,
        special_tokens_map={"eos_token": "<eot>", "bos_token": {"content": "<bos>", "lstrip": False}},
        tokenizer_config={"eos_token": {"content": "<eos>"}, "pad_token": None, "chat_template": "ignored"},
        generation_config={"eos_token_id": [258, 256], "temperature": 0.5},
        chat_template="the file",
    )
    loaded = load_tokenizer(path)
    assert loaded.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert (loaded.eos_ids, loaded.bos_id, loaded.pad_id) == ((256, 258), 257, None)
    assert loaded.chat_template == "the file"


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("framed", [False, True])
def test_added_ids_are_those_of_tokenizer_json(tmp_path, config, framed):
    from transformers import AutoTokenizer

    names = {"bos_token": "<bos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = byte_tokenizer(special=("<eos>", "<bos>"))
    if framed:
        frame_with(tokenizer.backend, "<bos>", None)
    path = write_directory(tmp_path, tokenizer, tokenizer_config=names | config)
    assert load_tokenizer(path).encode("a") == AutoTokenizer.from_pretrained(path).encode("a") == [257] * framed + [97]
    assert load_tokenizer(path).encode("a", add_special_tokens=False) == [97]


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.backend.enable_truncation(2)
    tokenizer.backend.enable_padding(length=9)
    assert load_tokenizer(write_directory(tmp_path, tokenizer)).encode("abcd") == ids_of("abcd")


def test_tokens_that_only_the_config_lists(tmp_path):
    listed = {"257": {"content": "<tool>", "special": True}, "256": {"content": "<eos>", "special": True}}
    path = write_directory(tmp_path, byte_tokenizer(), tokenizer_config={"added_tokens_decoder": listed})
    assert load_tokenizer(path).encode("a<tool><eos>") == [97, 257, 256]
    write_directory(tmp_path, byte_tokenizer(), tokenizer_config={"added_tokens_decoder": {"300": {"content": "<t>"}}})
    with pytest.raises(ValueError, match="to give '<t>' the id 300"):
        load_tokenizer(tmp_path)


def test_named_chat_templates(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = write_directory(tmp_path, byte_tokenizer(), tokenizer_config={"chat_template": named})
    assert load_tokenizer(path).chat_template == "d"
    write_directory(tmp_path, byte_tokenizer(), tokenizer_config={"chat_template": named[:1]})
    with pytest.raises(ValueError, match=r"called 'default' in .* got \['tool_use'\]"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer", "{}", "a tokenizer in .*tokenizer.json"),
        ("tokenizer", '{"model":', "a tokenizer in .*tokenizer.json"),
        ("tokenizer_config", "[]", "JSON object, got list"),
        ("tokenizer_config", "{" * 10, "to be JSON"),
        ("tokenizer_config", '{"eos_token": "<none>"}', "eos_token to be in the vocabulary, got '<none>'"),
        ("tokenizer_config", '{"eos_token": [1]}', r"a string or an object with a 'content', got \[1\]"),
        ("tokenizer_config", '{"chat_template": {"a": 1}}', "chat template to be a string, got dict"),
        ("tokenizer_config", '{"added_tokens_decoder": {"x": {"content": "a"}}}', "added_tokens_decoder to hold"),
        ("tokenizer_config", '{"added_tokens_decoder": {"1": "a"}}', "added_tokens_decoder to hold tokens"),
        ("generation_config", '{"eos_token_id": 257}', r"eos_ids below the vocabulary size 257, got \[257\]"),
        ("generation_config", '{"eos_token_id": [-1, "a"]}', r"got \[-1, 'a'\]"),
    ],
)
def test_damaged_directories(tmp_path, name, content, message):
    path = write_directory(tmp_path, byte_tokenizer())
    (path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


def test_where_there_is_no_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"a \.gguf file or a directory with a tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"a \.gguf file or a directory with a tokenizer\.json"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "model.gguf").write_bytes(b"no" * 50)
    with pytest.raises(ValueError, match="GGUF"):
        load_tokenizer(tmp_path / "model.gguf")


def test_transformers_is_not_imported():
    code = "import sys, specjax.io.text; print('transformers' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---- Encoding and decoding ----


def test_special_tokens_inside_a_text_are_parsed():
    assert byte_tokenizer().encode("a<eos>b") == [97, 256, 98]


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc"])
def test_lone_surrogates_are_refused(text):
    with pytest.raises(ValueError, match=f"lone surrogate at index {len(text) // 2}"):
        byte_tokenizer().encode(text)


def test_decoding():
    tokenizer = byte_tokenizer("hi")
    ids = np.array([256, 257, 0xE6, 99999], np.int32)
    assert tokenizer.decode(ids) == "hi\ufffd"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<eos>\ufffd"
    assert tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match="token ids of at least 0, got -1"):
        tokenizer.decode([104, -1])


def test_sentencepiece_decoding():
    tokenizer = Tokenizer(backend=backend_from_gguf(sentencepiece_metadata(SCORES)))
    byte = tokenizer.backend.token_to_id("<0xE6>")
    word = tokenizer.backend.token_to_id("▁a")
    assert tokenizer.decode([1, word, word]) == "a a" == tokenizer.backend.decode([1, word, word])
    assert tokenizer.decode([word, byte, word]) == "a\ufffd a" == tokenizer.backend.decode([word, byte, word])


# ---- Prompts ----


def test_prompt_rows():
    tokenizer = byte_tokenizer("xy", chat_template=TEMPLATE)
    eos = tokenizer.eos_ids[0]
    assert encode_prompt(tokenizer, {"prompt": "a<eos>", "id": 3}) == [97, eos]
    row = {"messages": [{"role": "u", "content": "xy"}]}
    assert encode_prompt(tokenizer, row) == [*ids_of("[u]"), 256, eos, *ids_of("[assistant]")]
    messages = row["messages"]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == [*ids_of("[u]"), 256, eos]


def test_chat_template_alone_decides_about_bos():
    metadata = byte_level_metadata(special=("<eos>", "<bos>"), pre="llama-bpe") | {"tokenizer.ggml.bos_token_id": 257}
    special = {"bos_token": "<bos>"}
    tokenizer = Tokenizer(backend=backend_from_gguf(metadata), special_tokens=special, chat_template="{{ bos_token }}a")
    assert tokenizer.encode("a") == [257, 97]
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == [257, 97]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, r"either 'prompt' or 'messages', got the keys \[\]"),
        ({"prompt": "", "messages": []}, r"got the keys \['messages', 'prompt'\]"),
        ({"prompt": None}, "'prompt' to be a string, got NoneType"),
        ({"messages": "hello"}, "a list of at least one message, got 'hello'"),
    ],
)
def test_rows_of_another_form(row, message):
    with pytest.raises(ValueError, match=message):
        encode_prompt(byte_tokenizer(chat_template=TEMPLATE), row)


def test_no_chat_template():
    with pytest.raises(ValueError, match="with a chat template, got none: use plain prompts, or"):
        encode_prompt(byte_tokenizer(), {"messages": [{"role": "user", "content": "x"}]})


# ---- Vocabularies ----


def of_size_40(*last, eos="<eos>"):
    """A tokenizer of 40 pieces or so: letters, then what is given."""
    vocabulary = {spell(chr(97 + i % 26) * (1 + i // 26)): i for i in range(38)}
    names = ("<eos>", "<end>", *last)
    backend = byte_tokenizer().backend
    parsed = json.loads(backend.to_str())
    parsed["model"] |= {"vocab": vocabulary | {name: 38 + i for i, name in enumerate(names)}, "merges": []}
    parsed["added_tokens"] = []
    backend = backend.from_str(json.dumps(parsed))
    backend.add_special_tokens(list(names))
    return Tokenizer(backend=backend, special_tokens={"eos_token": eos}, eos_ids=(backend.token_to_id(eos),))


def test_case_43_equal_content_in_another_layout(tmp_path):
    first = load_tokenizer(write_gguf(tmp_path / "model.gguf", byte_level_metadata("ab", " é", pre="gpt-2")))
    second = byte_tokenizer("ab", " é")
    assert second.backend.to_str() != first.backend.to_str()
    check_same_vocabulary(first, second)
    check_same_vocabulary(second, first)


def test_case_43_first_differing_piece_is_named():
    message = r"got id 256 as \(b'ab', 'text'\) in the target and \(b'ac', 'text'\) in the draft"
    with pytest.raises(ValueError, match=message):
        check_same_vocabulary(byte_tokenizer("ab", "xy"), byte_tokenizer("ac", "zz"))


def test_case_43_one_differing_piece_at_equal_size():
    with pytest.raises(ValueError, match=r"got id 40 as \(b'<one>', .* in the target and \(b'<two>', "):
        check_same_vocabulary(of_size_40("<one>"), of_size_40("<two>"))


def test_case_43_differing_eos():
    with pytest.raises(ValueError, match="to share their EOS id, got 38 and 39"):
        check_same_vocabulary(of_size_40(), of_size_40(eos="<end>"))
    with pytest.raises(ValueError, match="to share their EOS id, got 256 and None"):
        check_same_vocabulary(byte_tokenizer(), byte_tokenizer(eos_ids=()))


def test_same_piece_special_in_one_only():
    tokenizer = byte_tokenizer()
    plain = backend_from_gguf(byte_level_metadata() | {"tokenizer.ggml.token_type": np.ones(257, np.int32)})
    with pytest.raises(ValueError, match=r"got id 256 as \(b'<eos>', 'special'\) .* \(b'<eos>', 'text'\)"):
        check_same_vocabulary(tokenizer, Tokenizer(backend=plain, eos_ids=(256,)))


@pytest.mark.parametrize("last", ["[PAD41]", "<unused0>", "<|reserved_special_token_7|>", "<|extra_3|>"])
def test_case_43_padding_may_differ(last):
    check_same_vocabulary(of_size_40(last), of_size_40())
    check_same_vocabulary(of_size_40(), of_size_40(last))


def test_unused_pieces_of_a_file_are_padding():
    metadata = byte_level_metadata(special=("<eos>", "anything"))
    metadata["tokenizer.ggml.token_type"][-1] = UNUSED
    check_same_vocabulary(byte_tokenizer(), Tokenizer(backend=backend_from_gguf(metadata), eos_ids=(256,)))


@pytest.mark.parametrize("last", ["<tool>", "<think>", "[PAD]", "padding7"])
def test_more_text_is_no_padding(last):
    with pytest.raises(ValueError, match=r"got id 40 as .* in the target and None in the draft"):
        check_same_vocabulary(of_size_40(last), of_size_40())
