"""What the HTTP endpoints make of a body and of an answer, whoever serves them.

completion_endpoint  completions and chats
batch_line           one line of a batch's input, and what stands for it in the output (endpoints as
                     a batch names them)
"""
