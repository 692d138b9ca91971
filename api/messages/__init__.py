"""Anthropic's `/v1/messages`: a body becomes a chat, and the chat's answer becomes a message.

content_blocks   the blocks and tools of a body, and what they are in a chat
message_request  bodies of /v1/messages and /v1/messages/count_tokens
message_answer   the answer, whole or as server-sent events
message_errors   errors in Anthropic's shape
"""
