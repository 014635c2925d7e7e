"""SmolLM2-135M-Instruct with drafts from the text itself: what scripts/generate.py does without a config."""

from specjax.io.sources import DEFAULT_MODEL
from specjax.jobs.settings import NGram, Sampling, Settings
from specjax.verify import Rejection


def config() -> Settings:
    return Settings(
        model=DEFAULT_MODEL,
        dtype="float32",
        drafter=NGram(num_speculative_tokens=6),
        verifier=Rejection(),
        sampling=Sampling(temperature=0.0, max_new_tokens=128, seed=0),
    )
