"""`/v1/batches`: records that `millstream jobs` works on, and what has come of them.

batch_routes   create, show, list, cancel, pause and resume
result_routes  results so far, and one line by its id
"""
