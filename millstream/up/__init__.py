"""`millstream up`: everything on one machine, each service a child process that is kept running.

supervisor                  the order: start, wait until ready, keep running, stop
data_directory, file_lock   the data directory, with one owner at a time; it keeps the API key
launch_plan                 decides for each process: command, environment, time to drain
child_process, process_manager  starts one process, restarts it with backoff, stops it; all of them
fleet_table, machines/      the table `[fleet]`, and the machines that the fleet's plan wants
nats_server, broker_accounts, broker_health, nats_watchdog  the embedded nats-server, its accounts
                            and users, its health, and its restart when it is unhealthy
worker_rights               workers' NATS users get rights for models that come later
model_registration, demo_conversion_process  `--model` values become registered models; a demo model
                            is converted once, in a process of its own
state_file, health_probe, ready_message  how other commands find it, how it knows that all is ready,
                            and what it prints then
"""
