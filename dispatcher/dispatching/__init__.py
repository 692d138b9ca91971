"""dispatching."""
