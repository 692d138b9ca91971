"""The provider `process`: machines that are workers on this computer, as the fleet's plan says.

machine_life      what becomes of each machine, by the plan and the time (pure)
process_provider  stores that, and starts and ends workers accordingly
machine_files     their logs and credentials, and which of them stay
leftovers         workers of an earlier `millstream up` that still run
"""
