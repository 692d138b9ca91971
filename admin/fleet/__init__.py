"""Operations on the fleet: what there is, machines that operators want, and curves.

fleet_override    how many machines an operator wants, for the audit log (pure)
curve_change      what the audit log has of a curve (pure)
curve_operations  answers `curves.list` and `curves.put`
fleet_operations  answers `fleet.show` and `fleet.set`
"""
