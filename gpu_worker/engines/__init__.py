"""Engines turn sequences into tokens or vectors. Only those that need torch import it."""
