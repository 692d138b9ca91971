"""replies."""
