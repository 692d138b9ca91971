"""Operations on the fleet: what there is, what operators want, curves, and models on workers.

fleet_override    how many machines an operator wants, for the audit log (pure)
curve_change      what the audit log has of a curve (pure)
curve_operations  answers `curves.list` and `curves.put`
fleet_operations  answers `fleet.show` and `fleet.set`
serving_operations  answers `served.list`, `served.add` and `served.remove`
"""
