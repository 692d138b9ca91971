"""The fleet service: decides which machines there are to be, by what is asked for.

Any number of processes may run; the one that holds the lease `fleet` knows the signals and writes
the plan.

service           leads or stands by
signal_collector  hears heartbeats and load reports, reads the ledger, and answers questions
live_curves       corrects curves by heartbeats, and learns those that nobody has measured
ledger_reader     the ledger's messages of the last minutes, in order
signals/          what these say, as numbers at one time (pure)
planner/          what is to change, by the fleet's state (pure)
planning_state    that state, from signals and records (pure)
plan_step         the next plan, once the planner has decided (pure)
load_times        how long workers load a model, by machines' own lives (pure)
model_wakes       which models wake, and how far they are (pure)
plan_keeper       decides every second, stores the plan, and tells of wakes
metrics           the signals for Prometheus
settings          the settings of `millstream fleet`
"""
