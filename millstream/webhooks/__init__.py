"""The commands `millstream webhooks …`: webhook endpoints at a gateway, and what was sent to them.

settings  their settings: which gateway, which key
commands  list, create, test, deliveries, redeliver, rotate, enable, delete
"""
