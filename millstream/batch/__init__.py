"""The commands `millstream batch …`: batches at a gateway, as any client may have them.

settings   their settings: which gateway, which key
commands   submit, estimate, list, status, watch, results, items, retry, cancel,
           pause, resume
"""
