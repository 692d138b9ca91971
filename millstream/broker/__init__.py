"""The commands `millstream broker …`: keys, accounts and users of the message broker.

settings   what the commands take
commands   init, user
"""
