"""The cost of a fleet under a planner, beside other ways to scale, on a virtual clock.

arrivals           requests of the traces, resampled, and an adversary's
fleet_simulation   machines of types that boot, serve, drain and are paid
scalers            the planner, HPA on queue depth, an oracle, a static fleet
autoscaling_cost   the figures
plan_time          how long a decision over a large fleet takes
"""
