"""The vocabulary of Millstream: subjects, messages, errors, topology, and how to talk to NATS."""
