"""The scheduler's own pure code on a virtual clock, beside baselines; `bench/simulate.py` runs it.

clock        what is to happen, in the order of its time
request      what was asked for, and what became of it
loads        who asks when
step_model   how long a step takes
engine       continuous batching, chunked prefill, KV, priorities
prefixes     a worker's prefix cache
worker       the real `Credit`: pulls, attempts, beats
pool         the WORK stream
leader       the real `ModelState`
gateway      the real admission
delays       what lies between them
baselines    FCFS, VTC, EDF, early rejection, fairness per replica
systems      Millstream, or a baseline, whole
runs         a load against a system
measures     what figures are made of
scenario     figures, goals, settings
fairness     B1
isolation    B2
overload     B3
mixture      B4
affinity     B5
scale        what the simulator takes
report       tables and JSON
pictures     plots
"""
