"""The command line, and the life of every process it starts.

cli                a word becomes a command, its flags become settings, its coroutine a process
command_table      every command: name, help, settings class, coroutine (by name, not imported)
settings_loader    flags, then MILLSTREAM_*, then millstream.toml, into one frozen settings object
process_lifecycle  runs the coroutine: event loop, signals, drain timeout, exit status
gateway_client     a gateway's HTTP API, as `batch` and `webhooks` ask it
connection_failures  why a server could not be asked, in words (pure)
log_config, event_loop_lag  what every process logs, and measures of itself
settings, durations  settings of `up`, `lag`, `drain`, `usage` and `why`; `20s`, `15m`, `2h`, `7d`
up, admin, dead, models, fleet, bench  the commands; the services' own are in gateway, dispatcher,
                   gpu_worker
"""
