"""`/v1/batches`: records that `millstream jobs` works on, and what has come of them.

batch_routes     create, show, list, cancel, pause and resume
batch_creation   from a file to a batch whose results have their room reserved
result_routes    results so far, and one line by its id
estimate_routes  what a batch may take, before it is created
retry_routes     the failed lines of a batch as a new one
openapi_paths    what the OpenAPI document says of them (pure)
"""
