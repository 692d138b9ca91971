"""Credentials that an operator can create, limit, rotate and withdraw while everything runs.

key_format       makes and parses keys: `ms_<id>_<secret>_<checksum>`
key_pepper       the secret that all gateways share, without which no stored seal can be checked
key_strength     tells keys that could be guessed
key_records      the records: ManagedKey, and Denial, an entry of the deny-list for tokens
keys             the bucket `keys` as a live view, with every change of it

How often a key was used, and when last, is counted in the stream USAGE (streams/records/key_use).
"""
