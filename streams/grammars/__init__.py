"""Grammars that a generated text keeps to: checked, and translated for llguidance.

llguidance_grammar  checks a grammar and translates it
regex_repetition    counts how often a regular expression repeats its parts
"""
