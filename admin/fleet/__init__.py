"""Operations on the fleet: what there is, why, and what operators order.

fleet_override    what an operator orders, for the audit log (pure)
fleet_answer      what is told of the fleet (pure)
fleet_operations  answers `fleet.show`, `fleet.set` and `fleet.pause`
"""
