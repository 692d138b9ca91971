"""Decides which request is next and on which worker: one leader per model, elected by lease.

Requests come in as headers from REQUESTS, heartbeats from the workers, terms from the tenants.
service              elects a leader for each model; leader_assignment says who should lead which
model_dispatcher     receives the messages and runs the timers of one model
dispatching/         the model's state, the loop from REQUESTS to WORK, terminals
queueing/, workers/, estimate/  what the state consists of (pure)
settings             the settings of `millstream dispatcher`
reconcile/           compares all of it with the broker, and hands it to the next leader
lag_report, explain  what operators ask for
Work goes out to WORK, pressure to the gateways, terminals to the token logs.
"""
