"""Engines with one answer per input: requests come in, one row of numbers per input goes out.

engine         splits requests into inputs, runs micro-batches, puts the answers together
batcher        decides when a batch is due; `batch_time_model` predicts its computing time  (pure)
micro_batches  cuts a batch by length                                                       (pure)
padding        makes one tensor of each micro-batch
embed          the model is an encoder or decoder; `pooling` makes one vector of its states
classify       or it has a classification head; `activation` makes probabilities of its logits
"""
