"""Metrics and summaries."""
