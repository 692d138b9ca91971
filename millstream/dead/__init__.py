"""`millstream dead`: what an operator sees and does of requests that no worker could finish.

commands  list, show, replay and drop
replays   a dead letter as a new request, once
shown     letters as plain data, as a table, as words
"""
