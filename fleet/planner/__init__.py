"""The planner: which machines there are to be, and why. Pure: no clock and no I/O.

fleet_state         what it is told: models with demand and policy, types, machines, workers
machine_phases      what can be expected of each wanted machine; whether its type is any good
slow_machines       machines that do far less than their like
type_pauses         types that have failed lately
learned_capacities  what machines carry, where nobody has told it
demand_history      how much of a model is needed, from what was asked of it lately
type_offers         which types may be had for a model, and the cheapest of them for a need
model_view          a model with its machines, and what is to change
model_planner       what is to change for one model
budget              what all of them may cost
planner             all models: `Planner.decide(state, now)` returns a `fleet_decision`
planner_options     the constants of all these
"""
