"""The jobs service: what outlives the connection of the client that asked for it.

Any number of processes may run; each kind of work is done by the one that holds its lease.

service       builds the parts and runs them
batches/      files of requests, and their results
responses/    responses that run in the background, and deleted ones
file_sweeper  removes the bytes and records of files that were deleted or have expired
settings      the settings of `millstream jobs`
"""
