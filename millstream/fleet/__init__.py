"""`millstream fleet …`: asks the fleet service.

settings       settings of these commands
signals        asks for the signals, and prints them as tables or JSON
signal_tables  the tables of a report
"""
