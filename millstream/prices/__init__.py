"""`millstream prices`: has the admin service enter prices into the price book, and lists it.

settings    the model and its prices, as operators write them: for a million tokens
commands    set enters a price, list prints a table or JSON
"""
