"""Commands that ask a running system: each connects to NATS, asks, prints a table or JSON, ends.

lag             every lane and worker, from the dispatchers' reports
drain           asks one worker to finish or hand over its work, and waits until it is empty
usage           what tenants and keys have used of their quotas, from the usage counters
why             facts about one request or tenant: from its dispatcher, else its token log, else
                the ledger
explanations    turns these facts into sentences (pure)
fitted_table    tables that fit the width of a terminal
console_output  output width, exit status and answer time that they share
"""
