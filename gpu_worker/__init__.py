"""The work: pull requests that fit, run the engine, append tokens to their logs, beat, drain."""
