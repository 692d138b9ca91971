"""`millstream curves` and `millstream plan`: what machines do with models, and how many are needed.

settings       which curves, which file, and what is asked for
curve_file     reads a file of curves (pure)
commands       list, show and import print tables or JSON
"""
