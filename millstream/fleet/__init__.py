"""`millstream fleet`: asks the admin service for machines, and shows what becomes of them.

machine_settings  types, machines, and how many of which type for which model
machine_commands  prints tables or JSON
"""
