"""`millstream keys`: creates, lists, rotates and revokes API keys, by the admin service.

settings  what a key may do, and for how long
commands  print a new key once, or a table, a sentence or JSON
"""
