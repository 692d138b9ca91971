"""Reads what other files than tokenizer.json say of a model's tokeniser.

added_tokens     loads a tokeniser with the tokens that tokenizer.json lacks
bert_normalizer  sets case and accents of BERT's tokenisers as transformers does
token_types      tells whether a tokeniser marks which text of a pair a token belongs to
chat_templates   finds the chat template in each form in which directories have it
"""
