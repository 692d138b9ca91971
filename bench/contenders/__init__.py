"""Engines alone under the same load: `python -m bench.contenders.NAME`, each in its own process.

A contender may live in an environment without Millstream: those modules import nothing of it.
"""
