"""What tests of benchmarks share: a model that writes a known text, a counting clock, pairs of known figures."""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from harness import TableModel
from vocabularies import byte_tokenizer

from specjax.benchmark.measure import Pair
from specjax.benchmark.phases import Phases
from specjax.benchmark.questions import Question
from specjax.decode import DecodeConfig
from specjax.drafters.ngram import NGramDrafter
from specjax.jobs.completion import Batch, Completion
from specjax.jobs.decoder import Decoder
from specjax.jobs.prompts import Prompt
from specjax.jobs.settings import Sampling
from specjax.report.metrics import Timeline
from specjax.stats import count_step, init_stats
from specjax.types import DecodeStats, Params
from specjax.verify import ExactMatch

LINE = "0123abcdefghij"
KNOWN = LINE + "0"
"""A prompt from which the n-gram drafter proposes the text that follows, 1 2 3 a, and then b c d e."""
WINDOW = 4
TOKENIZER = byte_tokenizer(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}")


def line_decoder(max_new_tokens: int = 12) -> Decoder:
    """Writes LINE round and round, 12 tokens of it; drafts from the text, 4 tokens a step."""
    logits = np.random.default_rng(0).normal(size=(257, 257)).astype(np.float32)
    for one, next_one in itertools.pairwise(LINE + LINE[0]):
        logits[ord(one), ord(next_one)] += 50
    model = TableModel(vocab_size=257, max_positions=64)
    return Decoder(
        params=Params(target=jnp.asarray(logits)),
        config=DecodeConfig(target=model, drafter=NGramDrafter(num_tokens=WINDOW), verifier=ExactMatch()),
        tokenizer=TOKENIZER,
        eos_ids=TOKENIZER.eos_ids,
        sampling=Sampling(max_new_tokens=max_new_tokens),
    )


def ticking() -> Callable[[], float]:
    """A clock that is one second later at every look."""
    return map(float, itertools.count()).__next__


def stats_of(steps: Sequence[tuple[int, int, int]], window: int) -> DecodeStats:
    """The counters of a row whose steps drafted, accepted and emitted so many tokens."""
    stats = init_stats(1, window)
    for step in steps:
        stats = count_step(stats, jnp.array([True]), *(jnp.array([count]) for count in step))
    return jax.tree.map(lambda rows: np.asarray(rows)[0], stats)


def batch_of(steps: Sequence[tuple[int, int, int]], seconds: float, *, window: int = 0, name: str = "x") -> Batch:
    """One prompt of 10 tokens; the first step's tokens came after 1 second, the last one's at the end."""
    emitted = [step[2] for step in steps]
    row = Completion(
        prompt=Prompt(id=name, content="?", token_ids=(1,) * 10),
        text="",
        token_ids=tuple(range(sum(emitted))),
        finish_reason="length",
        stats=stats_of(steps, window),
        timeline=Timeline(start=0.0, emissions=((1.0, emitted[0]), (seconds, sum(emitted[1:])))),
        stepwise=False,
        log_probs=None,
    )
    return Batch(completions=(row,), seconds=seconds, compile_time_s=0.5, step_times_s=None, pace=None)


def pair_of(category: str = "a", *, fast: float = 5.0, slow: float = 9.0, name: str = "x") -> Pair:
    """8 tokens: speculatively in 3 steps (3 + 1, 0 + 1, 2 + 1 of 4, 0, 4 drafted), plainly in 8."""
    return Pair(
        questions=(Question(id=name, category=category, turns=("?",)),),
        batch_size=1,
        speculative=batch_of([(4, 3, 4), (0, 0, 1), (4, 2, 3)], fast, window=4, name=name),
        plain=batch_of([(0, 0, 1)] * 8, slow, name=name),
        speculative_phases=Phases(
            prefill_time_s=1.0,
            draft_time_s=0.6,
            verify_time_s=4.2,
            other_time_s=0.3,
            num_batch_steps=3,
            step_gaps_s=3.0,
            num_step_gaps=2,
        ),
        plain_phases=Phases(
            prefill_time_s=1.0,
            verify_time_s=8.0,
            other_time_s=0.4,
            num_batch_steps=8,
            step_gaps_s=7.7,
            num_step_gaps=7,
        ),
    )
