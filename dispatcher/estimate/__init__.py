"""Estimates how long requests wait and run. Pure; imports `queueing` and `workers`.

moving_averages  a decaying ratio and a decaying line fit
time_model       seconds to the first output and per output token, from completed runs
service_rate     reserved tokens that come free per second while requests wait
wait_estimator   both, with the queue and the fleet, as the pressure that gateways get
recent_usage     service by tenant in about the last minute
ttl_set          names remembered for some seconds
Completed runs, queue and fleet come in; waits, run times and usage go out.
"""
