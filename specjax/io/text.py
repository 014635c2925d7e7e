"""Text on the host: streaming without half characters, and stop strings."""

import bisect
import codecs
import dataclasses
from collections.abc import Iterable, Sequence

from specjax.io.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class StopMatch:
    """Where an output stops because a stop string appeared in its text."""

    stop: str
    """The stop string that was found."""
    text: str
    """The output text before it."""
    num_ids: int
    """Ids to keep: the shortest prefix whose tokens hold every byte of `text`. The last one kept may also hold the
    first bytes of the stop string; special tokens right before the stop string, having no text, are cut with it."""


class TextStream:
    """Turns a growing list of output ids into text, in time linear in its length.

    What has been returned never changes: the first bytes of a character wait for the rest of it, and the beginning of
    a stop string waits until it is one or not. All pieces together are `tokenizer.decode` of all ids, up to the first
    stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = {text: _stop_bytes(tokenizer, text) for text in _checked_stops(stop)}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.piece_rule.strips_first_space
        self._ends: list[int] = []  # bytes of text up to and including each id
        self._waiting = b""  # the last bytes, which may be the beginning of a stop string
        self._parts: list[str] = []
        self.match: StopMatch | None = None
        """The stop string that ended the text, once there is one; ids pushed after it are ignored."""

    def push(self, ids: Iterable[int]) -> str:
        """Adds output ids and returns the text that is certain now.

        Args:
          ids: the next output ids, in any number. Never the prompt's: a stop string does not begin there.
        """
        if self.match is not None:
            return ""
        data = self._waiting + b"".join(map(self._bytes, ids))
        found = _first_match(data, self._stops)
        if found is not None:
            return self._stop_at(data, *found)
        certain = len(data) - _longest_beginning(data, self._stops.values())
        self._waiting = data[certain:]
        return self._emit(data[:certain])

    def finish(self) -> str:
        """Returns what was held back, at the end of the output."""
        data, self._waiting = self._waiting, b""
        return self._emit(data, final=True)

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(int(token_id))
        if self._at_start and data:
            data, self._at_start = data.removeprefix(b" "), False
        self._ends.append(len(data) + (self._ends[-1] if self._ends else 0))
        return data

    def _emit(self, data: bytes, *, final: bool = False) -> str:
        self._parts.append(self._decoder.decode(data, final=final))
        return self._parts[-1]

    def _stop_at(self, data: bytes, stop: str, start: int) -> str:
        self._waiting = b""
        last = self._emit(data[:start], final=True)
        length = self._ends[-1] - len(data) + start
        num_ids = bisect.bisect_left(self._ends, length) + 1 if length else 0
        self.match = StopMatch(stop, "".join(self._parts), num_ids)
        return last


def find_stop(tokenizer: Tokenizer, output_ids: Iterable[int], stop: Sequence[str]) -> StopMatch | None:
    """Finds the stop string that ends an output.

    It is the one that is complete first, however the ids arrive; of those complete at the same byte, the longest. Only
    the text of the output counts: special tokens have none, and nothing of the prompt belongs to a match. Emitted ids,
    log-probabilities and counts are all to be cut to `num_ids`.

    Args:
      tokenizer: the model's.
      output_ids: the output, without the prompt and without padding.
      stop: strings to stop at; none of them is kept in the text.

    Returns:
      The match, or None if the text holds no stop string.

    Raises:
      ValueError: an empty stop string, or the text of a special token (stop at its id instead).
    """
    stream = TextStream(tokenizer, stop)
    stream.push(output_ids)
    return stream.match


def _checked_stops(stop: Sequence[str]) -> Sequence[str]:
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"expected a list of non-empty stop strings, got {stop!r}")
    return stop


def _stop_bytes(tokenizer: Tokenizer, text: str) -> bytes:
    token_id = tokenizer.backend.token_to_id(text)
    if token_id in tokenizer.special_ids:
        raise ValueError(f"expected stop strings of plain text, got the special token {text!r}: stop at id {token_id}")
    return text.encode()


def _first_match(data: bytes, stops: dict[str, bytes]) -> tuple[str, int] | None:
    """The stop string that ends first in `data` (the longest of several) and where it starts."""
    found = [(data.find(pattern) + len(pattern), text) for text, pattern in stops.items() if pattern in data]
    if not found:
        return None
    end, text = min(found, key=lambda match: (match[0], -len(stops[match[1]])))
    return text, end - len(stops[text])


def _longest_beginning(data: bytes, patterns: Iterable[bytes]) -> int:
    """Length of the longest suffix of `data` that a stop string could go on from."""
    lengths = [n for pattern in patterns for n in range(1, len(pattern)) if data.endswith(pattern[:n])]
    return max(lengths, default=0)
