"""Who may do what at the broker: keys, signed claims, and the files that hold them.

nkeys                NATS's keys: pairs, seeds, signatures
claims_token         claims as signed tokens (JWT): encode, decode, verify
credentials_file     a user's token and seed, as every NATS client reads them
"""
