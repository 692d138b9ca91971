"""`millstream dead`: requests that no worker could finish, for an operator.

settings   which letters: one id, or those of a tenant, model and age
commands   reads them from the stream DEAD, and lists, shows, replays or drops them
replays    queues a letter as a new request, at most once: compare-and-set, then its lane
rendering  letters as plain data, a table, words; never the text that a client wrote
"""
