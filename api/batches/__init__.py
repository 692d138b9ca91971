"""Batches as files: lines of input, and the lines that stand for their results.

batch_line      one line: from JSON to a submission, and from a result to JSON
input_lines     the lines of a stored file, from any byte on
line_index      where the line with an id is, in one small read
input_estimate  what an input may take, before it runs
estimate_body   what is told of that
result_lines    the results of a batch so far, in the order of its input
"""
