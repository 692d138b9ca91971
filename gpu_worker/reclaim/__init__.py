"""Notices that this machine is taken back, as its provider's metadata service tells them.

reclaim_notice    what the documents of the three providers say (pure)
metadata_client   one HTTP exchange with a metadata service, bounded in time and size
notice_sources    the three providers behind one interface
"""
