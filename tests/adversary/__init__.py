"""Adversaries: every class of credential tries everything on a running cell.

target_subjects     every subject of the topology and the table of rights, with names filled in
api_calls           every call of the JetStream API, and headers that spoof
promises            what each class may read and write; everything else is a hole
canaries            what must not be read, and how it is recognised in what was received
cell, victims       a cell with all services, and other tenants' requests that run throughout
broker_attacks, worker_attacks, gateway_attacks, connection_attacks  what is tried
store_audit         what is stored before and after, and what arrives in each account
results_file        the newest run of each class in bench/results
run, report         one adversary after the other; rows, the table, JSON
"""
