"""Python loads this before a process begins: its wall clock is off by `WALL_CLOCK_OFF` seconds."""

import os
import time

_off, _right = float(os.environ["WALL_CLOCK_OFF"]), time.time
time.time = lambda: _right() + _off
