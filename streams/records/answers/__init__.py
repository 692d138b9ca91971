"""Durable answers to NATS producers: each is stored once, by whoever ends the request.

answer_records  what an answer is, and which replies it stands for (pure)
answer_store    stores and reads answers in a stream of the tenant
durable_answer  the answer to one request, as its worker and its dispatcher end it
"""
