"""Operations on the fleet: what there is, and machines that operators want.

fleet_override    how many machines an operator wants, for the audit log (pure)
fleet_operations  answers `fleet.show` and `fleet.set`
"""
