"""Generation over files."""
