"""The commands `millstream batch …`: batches at a gateway, as any client may have them.

settings       their settings: which gateway, which key
batch_client   the calls, over HTTP
commands       submit, status, watch, results, items, cancel, pause, resume
"""
