"""No speculation: one token a step."""

from specjax.io.sources import DEFAULT_MODEL
from specjax.jobs.settings import NoDraft, Settings


def config() -> Settings:
    return Settings(model=DEFAULT_MODEL, drafter=NoDraft())
