"""Operations on the fleet: what there is, machines that operators want, and models on workers.

fleet_override    how many machines an operator wants, for the audit log (pure)
fleet_operations  answers `fleet.show` and `fleet.set`
serving_operations  answers `served.list`, `served.add` and `served.remove`
"""
