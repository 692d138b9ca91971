"""Responses that outlive their client: run in the background, or deleted.

background_responses  finds those that need work, while this process holds the lease
response_runner       brings one response to its end
"""
