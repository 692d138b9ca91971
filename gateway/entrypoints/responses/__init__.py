"""`/v1/responses`: answers that can be read again, continued, and run without their client.

response_creation  create, whole, streamed or in the background
response_stream    writes events, and pings a silent client
stored_stream      the stream of a stored response, from any number on, at any gateway
openapi_paths      what the OpenAPI document says of them
response_routes    show, stream, cancel, delete, and the items of the input
"""
