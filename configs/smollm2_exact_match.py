"""Sampling whose tokens are those of plain decoding with the same seed, whatever the drafter."""

from specjax.io.sources import DEFAULT_MODEL
from specjax.jobs.settings import NGram, Sampling, Settings
from specjax.verify import ExactMatch


def config() -> Settings:
    return Settings(
        model=DEFAULT_MODEL,
        drafter=NGram(),
        verifier=ExactMatch(),
        sampling=Sampling(temperature=0.7, top_p=0.9),
    )
