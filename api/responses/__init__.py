"""Responses (`/v1/responses`): one translation to the chat that exists, and back to items.

chat_translation  a response's items become a chat
conversation      the stored responses that one continues, as items
truncation        leaves out the beginning of a conversation that is too long
response_bodies   the `response` object
response_events   the events of a stream, numbered by the token log, and the output that they make
stored_events     a result as the same events, and as the object
"""
