"""`millstream prices`: enters prices into the price book, and lists it.

settings    the model and its prices, as operators write them: for a million tokens
commands    writes by `registry/price_book.py`, which counts in whole 10⁻¹² of the currency
"""
