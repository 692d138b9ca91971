"""Runs the scheduler's own code on a virtual clock, beside baselines; see `bench/simulate.py`.

workloads              what is asked for, and when
virtual_clock, delays  the order of events, and how long each hop takes
work_stream, worker    a simulated WORK, and the real Credit pulling from it; engines: `simulation/`
leader, gateway        the real ModelState and the real load shedding, driven without a broker
baselines, systems     FCFS, VTC, EDF, early rejection; Millstream or one of these as a whole
runs, measures         a workload against a system, and what figures are made of
scenario, scenarios/   figures with goals, and B1 to B5
report, plots          tables, JSON, PNG
"""
