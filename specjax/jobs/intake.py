"""From rows to requests: what a process has yet to complete, encoded, cut where that was asked for, and sorted."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator

from specjax.io.text import TextStream
from specjax.jobs.batching import Request
from specjax.jobs.decoder import Decoder
from specjax.jobs.prompts import encode_prompts
from specjax.jobs.rows import Fault, Row
from specjax.jobs.settings import Settings

READ_AHEAD = 1024
"""Rows that are encoded and sorted by length at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticket:
    """What is to be remembered of a row while it is being completed."""

    digest: str
    num_truncated_tokens: int


class Intake:
    """Encodes rows as slots become free for them."""

    def __init__(self, settings: Settings, decoder: Decoder, skip: Callable[[Row, Fault], None]) -> None:
        """`skip` is told of each row that cannot be completed; it may raise to stop the job."""
        self._settings, self._decoder, self._skip = settings, decoder, skip
        self.tickets: dict[str | int, Ticket] = {}
        """Of rows that have become requests, by id; to be taken out when they are complete."""

    def requests(self, rows: Iterator[Row]) -> Iterator[Request]:
        """The requests of rows; of each stretch the longest prompts come first, so that buffers grow early."""
        while chunk := list(itertools.islice(rows, READ_AHEAD)):
            requests = [request for row in chunk for request in self._request(row)]
            yield from sorted(requests, key=lambda request: -len(request.prompt.token_ids))

    def _request(self, row: Row) -> Collection[Request]:
        """The row's request, or none if it cannot be completed."""
        try:
            prompt = encode_prompts(self._decoder.tokenizer, [row.prompt], raw=self._settings.raw_prompt)[0]
            TextStream(self._decoder.tokenizer, row.sampling.stop)
            surplus = self._surplus(len(prompt.token_ids), row)
        except ValueError as error:
            self._skip(row, Fault(line=row.line, error=str(error)))
            return ()
        self.tickets[row.prompt.id] = Ticket(digest=row.digest, num_truncated_tokens=surplus)
        kept = dataclasses.replace(prompt, token_ids=prompt.token_ids[surplus:])
        return (Request(prompt=kept, sampling=row.sampling),)

    def _surplus(self, num_tokens: int, row: Row) -> int:
        """Tokens that the prompt has to lose.

        Raises:
          ValueError: it must not lose any.
        """
        job, new = self._settings.job, row.sampling.max_new_tokens
        most = self._decoder.config.target.max_positions - new
        most = most if job.max_prompt_tokens is None else min(most, job.max_prompt_tokens)
        if num_tokens > most and (job.long_prompts == "refuse" or most < 1):
            raise ValueError(
                f"expected a prompt of at most {most} tokens beside {new} new ones, got {num_tokens} (--long-prompts "
                "truncate drops its beginning)"
            )
        return max(0, num_tokens - most)
