"""Tenants' files: their records in a bucket, and their bytes in chunks of a stream.

file_records  what is stored of a file besides its bytes (pure)
file_store    stores, reads and removes files
chunk_cache   keeps chunks that are read again and again (pure)
"""
