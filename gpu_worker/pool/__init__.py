"""One model version on this worker: its part in the pool of workers that serve the version.

Work comes in from JetStream, as much as there is credit for; attempts, acknowledgements and
heartbeats go out.

model_server        owns the engine holder, the attempts and the credit; the others are its parts
pull_loops          pulls from the shared work of each priority, and from the work placed on this
                    worker
credit              the sequences and KV tokens that can still be accepted
ack_keepalive       extends the ack wait of accepted work; broker_outage says when others may have
                    it
heartbeat           sends the model server's heartbeat, with the parts cache_report and
                    progress_report
handover_selection  at a drain, picks attempts to release
peer_heartbeats     hears what peers have free; peer_capacity is what they have announced
"""
