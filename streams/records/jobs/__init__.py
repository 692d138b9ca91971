"""Records of jobs: what outlives the connection of the client that asked for it.

batch_records  what a batch is, and how far it is (pure); `batch_store` stores it
item_results   how a line of a job ended (pure); `result_store` stores that once
run_hours      in which hours of the day a batch may run (pure)
result_space   room for the results of batches, promised before they run
job_item       one request that runs a line, as its worker and its dispatcher end it
"""
