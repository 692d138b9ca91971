"""The simulated benchmarks: each file has SCENARIOS, with figures, goals and a measure per seed.

fairness          B1: backlogged tenants get equal service, or by weight
isolation         B2: nine quiet tenants beside a loud one
overload          B3: goodput beyond capacity, and recovery from a burst
mixed_priorities  B4: batch fills what interactive leaves
prefix_affinity   B5: prefix cache hits over eight workers
simulator_speed   how much CPU the simulator itself takes
"""
