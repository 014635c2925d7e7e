"""Checkpoints, tokenizers and model sources."""
