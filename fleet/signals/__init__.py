"""The fleet signals: demand, goals and load of each model, and load of the gateways. Pure.

ledger_window   what of the ledger's last seconds ended, was refused, and kept its goal
counter_rate    the rate of a number that its owner only counts up
arrival_rates   requests and tokens that arrive, by priority, from a leader's load reports
worker_pools    what workers of one version and machine type hold, from their last heartbeats
live_pace       what workers at their work say of a curve, from their heartbeats
gateway_loads   how busy each gateway is, from its beats
signal_window   all of it together
signal_report   what it says at one time
Records, reports and beats come in, each with its time; a report goes out.
"""
