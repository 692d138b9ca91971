"""Access to the broker: keys, signed claims, and the table of rights they are made from.

nkeys                    NATS's keys: pairs, seeds, signatures
claims_token             claims as signed tokens (JWT): encode, decode, verify
credentials_file         a user's token and seed, as every NATS client reads them
claims                   claims of operators, accounts, users and imports
rights                   one line of the table: a subject, its account, and what users are pinned to
access                   the table: user class, account, rights
rights_table             the table in Markdown, for docs/accounts.md
minting                  tokens of accounts and users, made of signing keys and the table
server_configuration     what a nats-server's file says of accounts
cell_directory           a cell's keys and credentials on disk, in private_file's files
key_rotation             signing keys replaced: new ones beside the old ones, then without them
user_revocation          single users cut off, in their accounts' claims
Running servers are told of accounts by `streams/broker/account_claims.py`.
"""
