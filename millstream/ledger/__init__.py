"""`millstream ledger` and `millstream invoice`: what is stored in the ledger leaves it as files.

lines             a message of the ledger as a JSON object (pure)
segments          files of such lines, each with its sequences and its hash in its name
request_ids       the index by which each request is in the segments once
export_directory  the three together: takes records in order, keeps each request once
exporter          reads the ledger into a directory, removes from the ledger what is there
cloud_events      a request as a CloudEvent (pure)
event_sender      posts a directory's requests to a meter
invoices          adds up a tenant's month to the last unit
"""
