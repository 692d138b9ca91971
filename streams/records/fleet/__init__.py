"""The fleet's machines in the bucket `fleet`: what is wanted, and what its provider has.

machine_types  a kind of machine that can be had (pure)
fleet_plan     the machines that are wanted, by id (pure)
machine_list   the provider's own list of machines, written before it acts (pure)
step_times     how long an engine's steps take, and a full batch of like requests (pure)
curves         what a machine type does with a model version, as measured (pure)
curve_store    reads and writes curves
fleet_store    reads and changes both by compare-and-set
"""
