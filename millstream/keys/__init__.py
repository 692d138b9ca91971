"""`millstream keys`: creates, lists, rotates and revokes API keys, by the admin service.

`millstream admin bootstrap` makes the first one that may do so.

settings  what a key may do, and for how long
commands  print a new key once, or a table, a sentence or JSON
"""
