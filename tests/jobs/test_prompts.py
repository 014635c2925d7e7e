import json

import pytest
from small_jobs import TEMPLATE, USER
from vocabularies import byte_tokenizer

from specjax.jobs.prompts import Prompt, encode_prompts, read_prompts

CHAT = byte_tokenizer(special=("<eos>", "<user>"), chat_template=TEMPLATE)
BARE = byte_tokenizer()
SILENT = byte_tokenizer(chat_template="{# no word #}")


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_texts_are_numbered_from_zero():
    assert read_prompts(["a", "b"]) == [Prompt(id=0, content="a"), Prompt(id=1, content="b")]


def test_text_file_has_one_prompt_a_line(tmp_path):
    path = write(tmp_path, "prompts.txt", "\ufeffone\r\n two \x0b\u2028 \nthree")
    assert [prompt.content for prompt in read_prompts(path=path)] == ["one", " two \x0b\u2028 ", "three"]
    assert [prompt.id for prompt in read_prompts(["zero"], path)] == [0, 1, 2, 3]


def test_jsonl_has_prompts_messages_and_ids(tmp_path):
    talk = '{"messages": [{"role": "user", "content": "hé"}], "id": "x", "category": "qa"}'
    path = write(tmp_path, "prompts.jsonl", f'{{"prompt": "p"}}\n{talk}\n{{"prompt": "p", "id": 7}}\n')
    prompts = read_prompts(path=path)
    assert [prompt.id for prompt in prompts] == [0, "x", 7]
    assert [prompt.content for prompt in prompts] == ["p", [{"role": "user", "content": "hé"}], "p"]


def test_questions_of_spec_bench_ask_their_first_turn(tmp_path):
    question = {"question_id": 81, "category": "writing", "turns": ["One.\u2028", "Two."], "id": "unused"}
    rows = [question, {"turns": ["Three."]}, {"prompt": "Four.", "turns": ["ignored"]}]
    path = write(tmp_path, "q.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_prompts(path=path) == [
        Prompt(id=81, content="One.\u2028"),
        Prompt(id=1, content="Three."),
        Prompt(id=2, content="Four."),
    ]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.txt", "one\n\nthree\n", "line 2: expected a prompt, got an empty line"),
        ("p.txt", b"one\n\xff\n", "UTF-8"),
        ("p.txt", "", "at least one prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2: expected JSON, got a fault at column 11: "),
        ("p.jsonl", '{"prompt": "a"}\n\n', "line 2: expected JSON, got an empty line"),
        ("p.jsonl", '["prompt"]\n', "line 1: expected an object with either"),
        ("p.jsonl", '{"text": "a"}\n', "line 1: expected an object with either"),
        ("p.jsonl", '{"prompt": "a", "messages": []}\n', "line 1: expected an object with either"),
        ("p.jsonl", '{"prompt": ["a"]}\n', "line 1: expected a prompt to be a string"),
        ("p.jsonl", '{"messages": "a"}\n', "line 1: expected a prompt to be a string and messages to be a list"),
        ("p.jsonl", '{"prompt": "a", "top_k": 1}\n', "line 1: expected 'top_k' inside 'sampling'"),
        ("p.jsonl", '{"prompt": "a", "sampling": {"top_k": 1}}\n', "line 1: expected no 'sampling' with --prompts"),
        ("p.jsonl", '{"turns": []}\n', r"line 1: expected 'turns' to be a list of texts, got \[\]"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ""}\n', "line 2: prompt 1: expected some text, got an empty one"),
        ("p.jsonl", '{"turns": [""]}\n', "line 1: prompt 0: expected some text"),
        ("p.jsonl", '{"prompt": "a", "logit_bias": {"5": 1}}\n', "line 1: expected no 'logit_bias', which is not supp"),
        ("p.jsonl", '{"turns": [1]}\n', "line 1: expected a prompt to be a string"),
        ("p.jsonl", '{"prompt": "a", "id": true}\n', "line 1: expected 'id'"),
        ("p.jsonl", '{"prompt": "a", "id": 1}\n{"prompt": "b"}\n', "line 2: expected an id of its own, got 1"),
        ("p.jsonl", "[" * 100_000, "line 1: "),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path, name, text, says):
    path = write(tmp_path, name, text)
    with pytest.raises(ValueError, match=says):
        read_prompts(path=path)


def test_no_prompts_at_all():
    with pytest.raises(ValueError, match="at least one prompt"):
        read_prompts()


def ids(tokenizer, content, *, raw=False):
    return encode_prompts(tokenizer, [Prompt(id=0, content=content)], raw=raw)[0].token_ids


def test_a_text_is_a_users_message_where_there_is_a_template():
    assert ids(CHAT, "hi") == (USER, *b"hi")
    assert ids(CHAT, "hi", raw=True) == tuple(b"hi")
    assert ids(BARE, "hi") == ids(BARE, "hi", raw=True) == tuple(b"hi")


def test_messages_always_go_through_the_template():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ids(CHAT, talk) == ids(CHAT, talk, raw=True) == (USER, *b"a", USER, *b"b")
    with pytest.raises(ValueError, match=r"prompt 0: .*chat template"):
        ids(BARE, talk)


def test_what_cannot_be_encoded_is_named():
    with pytest.raises(ValueError, match=r"prompt 'x': .*surrogate"):
        encode_prompts(BARE, [Prompt(id="x", content="\ud800")])
    with pytest.raises(ValueError, match="prompt 0: expected at least one token"):
        ids(SILENT, "x")


def test_an_empty_text_is_no_prompt():
    """Even where the chat template would make tokens of it."""
    with pytest.raises(ValueError, match="prompt 1: expected some text, got an empty one"):
        read_prompts(["a", ""])
