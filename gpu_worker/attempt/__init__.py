"""attempt."""
