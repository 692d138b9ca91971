"""`millstream fleet …`: asks for machines, and shows what becomes of them and how many are needed.

settings          settings of the command that shows signals
signals           asks the fleet service for its signals, and prints them as tables or JSON
signal_tables     the tables of a report
machine_settings  settings of the commands that ask the admin service
machine_commands  types and machines; orders of machines, and pauses
plan_commands     what was decided, and why
"""
