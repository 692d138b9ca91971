"""Records that many processes change by compare-and-set, and none keeps in memory.

cas_record   the base of such a record (pure)
cas_records  reads, lists and changes those of one stream
"""
