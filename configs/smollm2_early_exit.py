"""The model's own first layers draft. SmolLM2 was not trained to exit early: this shows how, not how fast."""

from specjax.io.sources import DEFAULT_MODEL
from specjax.jobs.settings import EarlyExit, Settings
from specjax.verify import Block


def config() -> Settings:
    return Settings(
        model=DEFAULT_MODEL,
        drafter=EarlyExit(exit_layer=20, num_speculative_tokens=2),
        verifier=Block(),
    )
