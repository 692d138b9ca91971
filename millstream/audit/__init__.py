"""`millstream audit`: shows, verifies and exports what was changed, by the admin service.

settings       whose changes, of what, since when; a head that was kept elsewhere
commands       print records, follow them, check the chain, write files
record_text    a record as one line for people (pure)
exported_files files of records in a directory, which follow each other without a gap
"""
