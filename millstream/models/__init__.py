"""`millstream models`: what an operator sees and changes of the registry.

settings  which files, server, alias or adapter, with limits, prices and latency goals
check     reads a directory without registering it: what is wrong, what it takes in memory
commands  add reads files or describes a server and registers it; list and show print tables or
          JSON; remove forgets a name, and leaves the files; aliases move, and back
version_changes  who changed a model or an alias, and in what versions differ
serving   which models running workers have to serve
"""
