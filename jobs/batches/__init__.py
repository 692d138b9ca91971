"""Batches: an input file becomes requests, their results become an output and an error file.

batch_supervisor  finds batches that have not ended, and runs each under a lease
batch_runner      one batch: checks its input, feeds it, counts results, finishes it
input_check       whether a file is the input of a batch
item_feeder       publishes lines as requests, under the tenant's quotas
page_counts       what one page of results adds to the record
line_states       which lines are under way, and when one is tried again (pure)
index_file        stores where each line of the input is, by its id
output_files      renders results into files
"""
