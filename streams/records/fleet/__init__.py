"""The fleet's machines in the bucket `fleet`: what is ordered, wanted, and there.

machine_types  a kind of machine that can be had (pure)
model_policy   how many workers a model may have (pure)
fleet_orders   what operators order by hand (pure)
cold_start     how long a model without workers takes to its next one (pure)
fleet_plan     the machines that are wanted, by id, and the decisions that led there (pure)
machine_list   the provider's own list of machines, written before it acts (pure)
waking         how far the wake of a model is, as the fleet tells gateways (pure)
step_times     how long an engine's steps take, and a full batch of like requests (pure)
curves         what a machine type does with a model version, as measured (pure)
curve_store    reads and writes curves
fleet_store    reads and changes all of them by compare-and-set
"""
