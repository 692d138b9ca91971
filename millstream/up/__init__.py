"""`millstream up`: everything on one machine, each service a child process that is kept alive.

supervisor   the order of things: start, wait until ready, stop
child        one process: start, restart, stop, its log
plan         which processes, with which environment
broker       the embedded nats-server
health       its word about itself, and a restart when that helps
probe        asking a process how it is
catalogue    `--model` values to registered models
preparation  a demo model's one-time conversion, in a process of its own
welcome      what is printed when all is ready
"""
