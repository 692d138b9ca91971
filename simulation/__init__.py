"""Models of engines and machines without a GPU: pure, imports only `streams`.

step_model    how long a step takes by what is in it; how much KV and how many sequences fit
prefix_cache  which prompt blocks a worker's cache holds (LRU)
request       what is asked for, and what became of it
engine        batches requests step by step, as the paged scheduler does, over the two models
The mock engine takes its pace from a step model; the simulations of `bench` use all of it.
A request is added; each step returns its seconds and which requests got a first or last token.
"""
