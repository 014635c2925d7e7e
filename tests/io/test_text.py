import random

import pytest
from vocabularies import NASTY, byte_tokenizer, sentencepiece_metadata

from specjax.io.gguf_tokenizer import backend_from_gguf
from specjax.io.text import StopMatch, TextStream, find_stop
from specjax.io.tokenizer import Tokenizer

BYTES = byte_tokenizer()
EOS = BYTES.eos_ids[0]
SENTENCEPIECE = Tokenizer(backend=backend_from_gguf(sentencepiece_metadata({"▁": -3.0, "a": -4.0, "▁a": -1.0})))


def ids_of(text):
    return list(text.encode())


def windows(ids, generator):
    """The ids cut at random places, empty windows included."""
    cuts = sorted(generator.randrange(len(ids) + 1) for _ in range(generator.randrange(6)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(tokenizer, pushes, stop=()):
    stream = TextStream(tokenizer, stop)
    deltas = [stream.push(ids) for ids in pushes] + [stream.finish()]
    return deltas, stream.match


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_case_17_stop_string_inside_a_window_of_any_size(size):
    ids = ids_of("xxabcdefgh")
    deltas, match = run(BYTES, [ids[i : i + size] for i in range(0, len(ids), size)], ["ab"])
    assert match == StopMatch(stop="ab", text="xx", num_ids=2)
    assert "".join(deltas) == "xx"
    assert match == find_stop(BYTES, ids, ["ab"])


def test_case_17_stop_string_split_over_two_windows():
    stream = TextStream(BYTES, ["ab"])
    assert stream.push(ids_of("xxa")) == "xx"
    assert stream.match is None
    assert stream.push(ids_of("bcd")) == ""
    assert stream.match == StopMatch(stop="ab", text="xx", num_ids=2)
    assert (stream.push(ids_of("more")), stream.finish()) == ("", "")
    assert stream.match.num_ids == 2


def test_case_17_stop_string_that_begins_in_the_prompt_does_not_match():
    assert find_stop(BYTES, ids_of("bcd"), ["ab"]) is None
    assert find_stop(BYTES, ids_of("bcdab"), ["ab"]) == StopMatch(stop="ab", text="bcd", num_ids=3)


def test_last_kept_token_may_hold_the_beginning_of_the_stop_string():
    tokenizer = byte_tokenizer("xxa", "bcd")
    ids = tokenizer.encode("xxabcd")
    assert len(ids) == 2
    match = find_stop(tokenizer, ids, ["ab"])
    assert match == StopMatch(stop="ab", text="xx", num_ids=1)
    assert tokenizer.decode(ids[:1]) == "xxa"


def test_text_that_is_nothing_but_a_stop_string_keeps_no_id():
    assert find_stop(byte_tokenizer("ab"), [256], ["ab"]) == StopMatch(stop="ab", text="", num_ids=0)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcd", ["bcd", "c"], ("c", "ab")),  # complete first, though it starts later
        ("abcd", ["b", "ab"], ("ab", "")),  # complete together: the longest
        ("aab", ["ab"], ("ab", "a")),  # a false beginning
        ("xaaab", ["aab"], ("aab", "xa")),  # beginnings inside a beginning
        ("a\n\nb\n\nc", ["\n\n"], ("\n\n", "a")),  # the first of several
        ("漢字é。", ["é"], ("é", "漢字")),  # bytes that are whole characters
        ("abc", ["x", "bd"], None),
        ("", ["a"], None),
        ("abc", [], None),
    ],
)
def test_which_stop_string_ends_the_text(text, stop, expected):
    match = find_stop(BYTES, ids_of(text), stop)
    assert (match and (match.stop, match.text)) == expected
    assert match is None or match.num_ids == len(match.text.encode())
    one_by_one = run(BYTES, [[i] for i in ids_of(text)], stop)
    assert one_by_one[1] == match
    assert "".join(one_by_one[0]) == (match.text if match else text)


def test_special_tokens_have_no_text_and_do_not_part_a_stop_string():
    ids = [*ids_of("x"), EOS, *ids_of("a"), EOS, *ids_of("b")]
    assert find_stop(BYTES, ids, ["ab"]) == StopMatch(stop="ab", text="x", num_ids=1)


def test_kept_ids_are_the_shortest_prefix_that_holds_the_text():
    generator = random.Random(0)
    tokenizer = byte_tokenizer("ab", "ba", "aab", "é", "bé")
    for _ in range(1000):
        ids = [generator.choice([97, 98, *range(256, tokenizer.vocab_size)]) for _ in range(10)]
        match = find_stop(tokenizer, ids, ["aba", "éb"])
        text = tokenizer.decode(ids)
        ends = [text.find(stop) + len(stop) for stop in ("aba", "éb") if stop in text]
        assert (match is None) == (not ends)
        if match:
            assert text.startswith(match.text + match.stop)
            assert len(match.text + match.stop) == min(ends)
            holds = [tokenizer.decode(ids[:n]).startswith(match.text) for n in range(11)]
            assert match.num_ids == holds.index(True)


@pytest.mark.parametrize("text", NASTY)
def test_streamed_text_is_the_decoded_text(text):
    for tokenizer in (BYTES, byte_tokenizer("漢字", " th", "👩"), SENTENCEPIECE):
        ids = tokenizer.encode(text, add_special_tokens=False)
        deltas, match = run(tokenizer, [[i] for i in ids])
        assert "".join(deltas) == tokenizer.decode(ids)
        assert match is None
        assert "\ufffd" in text or all("\ufffd" not in delta for delta in deltas)


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE])
def test_any_ids_in_any_windows(tokenizer):
    generator = random.Random(1)
    alphabet = [32, 97, *range(128, 256), *range(256, tokenizer.vocab_size), tokenizer.vocab_size + 7]
    for _ in range(1000):
        ids = [generator.choice(alphabet) for _ in range(generator.randrange(12))]
        for stop in ([], ["a", "éa"], ["zz"]):
            deltas, match = run(tokenizer, windows(ids, generator), stop)
            assert match == find_stop(tokenizer, ids, stop)
            assert "".join(deltas) == (match.text if match else tokenizer.decode(ids))


def test_half_a_character_waits_and_then_comes_whole():
    stream = TextStream(BYTES)
    assert [stream.push([byte]) for byte in "a👩b".encode()] == ["a", "", "", "", "👩", "b"]
    assert stream.finish() == ""


def test_what_never_becomes_a_character_comes_at_the_end():
    deltas, _ = run(BYTES, [[0x61], [0xF0], [0x9F]])
    assert deltas == ["a", "", "", "\ufffd"]


def test_only_the_first_space_of_sentencepiece_text_goes():
    space_a = SENTENCEPIECE.backend.token_to_id("▁a")
    assert run(SENTENCEPIECE, [[space_a], [space_a]])[0] == ["a", " a", ""]


def test_each_id_is_looked_at_once(monkeypatch):
    seen = []
    original = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i: seen.append(i) or original(self, i))
    ids = ids_of("abcdefghij" * 20)
    run(BYTES, [[i] for i in ids], ["jb", "never"])
    assert seen == ids


@pytest.mark.parametrize("stop", ["ab", [""], [3], ["a", None]])
def test_stop_strings_that_are_none(stop):
    with pytest.raises(ValueError, match="expected a list of non-empty stop strings"):
        find_stop(BYTES, [], stop)


def test_stop_string_that_is_a_special_token():
    with pytest.raises(ValueError, match=f"got the special token '<eos>': stop at id {EOS}"):
        find_stop(BYTES, [], ["x", "<eos>"])
