"""The fleet service: what says how many workers and gateways are needed.

Any number of processes may run; the one that holds the lease `fleet` knows the signals.

service           leads or stands by
signal_collector  hears heartbeats and load reports, reads the ledger, and answers questions
ledger_reader     the ledger's messages of the last minutes, in order
signals/          what these say, as numbers at one time (pure)
planner/          decides which machines there are to be (pure)
metrics           the signals for Prometheus
settings          the settings of `millstream fleet`
"""
