import pytest

from specjax.io.files import read_json


def test_reads_an_object(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, null], "\u00e9": true}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None], "\u00e9": True}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b"[" * 100_000, b'{"a": "\xff"}', b"{}{}"],
)
def test_refuses_what_is_not_an_object_of_finite_numbers(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected .*a\.json to"):
        read_json(path)


def test_refuses_files_above_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.io.files.MAX_JSON_BYTES", 9)
    path = tmp_path / "a.json"
    path.write_text('{"a": 12}')
    assert read_json(path) == {"a": 12}
    path.write_text('{"a": 123}')
    with pytest.raises(ValueError, match="at most 9 bytes"):
        read_json(path)


def test_refuses_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"expected the file .*a\.json, got none"):
        read_json(tmp_path / "a.json")
