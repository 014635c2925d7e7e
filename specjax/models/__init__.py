"""Language models as pure functions."""
