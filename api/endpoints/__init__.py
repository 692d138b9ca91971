"""HTTP endpoints: from a body to a submission, and from an answer to a body, without a server.

completion_endpoint  completions and chats
"""
