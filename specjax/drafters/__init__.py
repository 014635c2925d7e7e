"""Drafting strategies, one a file."""
