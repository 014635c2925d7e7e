"""Measurements that a user can act on: speculation beside plain decoding, sweeps, and what pays on this machine."""
