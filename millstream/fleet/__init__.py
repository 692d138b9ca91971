"""`millstream fleet …`: asks for machines, and shows what becomes of them and how many are needed.

settings          settings of the command that shows signals
signals           asks the fleet service for its signals, and prints them as tables or JSON
signal_tables     the tables of a report
machine_settings  types, machines, and how many of which type for which model
machine_commands  asks the admin service for machines, and prints tables or JSON
"""
