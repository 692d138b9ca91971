"""Stored responses: what was asked for, kept so that it can be read, continued or run later.

response_records  what a stored response is, and which request runs it (pure)
response_store    the bucket `responses`, with notes of those that need work
"""
