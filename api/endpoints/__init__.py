"""What the HTTP endpoints make of a body and of an answer, whoever serves them.

completion_endpoint  completions and chats
"""
