"""`millstream curves` and `millstream plan`: what machines do with models, and how many are needed.

settings       which curves, which file, and what is asked for
curve_file     reads a file of curves (pure)
commands       list, show and import print tables or JSON
plan_settings  a rate, lengths of requests, goals
capacity_plan  computes workers of a type for a demand, and what one more changes (pure)
plan           asks for curves and prices, and prints the plan
"""
