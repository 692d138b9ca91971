"""One request on this worker, from its delivery to its terminal.

A delivery comes in; the token log with its terminal, a ledger record and an acknowledgement go out.

attempt           claims the token log, runs the request, appends its tokens, ends, acknowledges
poison_guard      reads the history of earlier attempts, quarantines a suspect, records the outcome
start_quarantine  which requests may start in the engine now; a suspect starts alone
output_buffer     the engine's outputs until the next append, as records of bounded size
terminals         the terminal and the ledger record that an attempt ends with
finished_logs     logs that have ended, kept in case the brokers lose them
stage_timer       the milliseconds of each stage, and the deadline
"""
