"""Operations on the fleet: what there is and why, operators' orders, curves, models on workers.

fleet_override    what an operator orders, for the audit log (pure)
fleet_answer      what is told of the fleet (pure)
fleet_operations  answers `fleet.show`, `fleet.set` and `fleet.pause`
curve_change      what the audit log has of a curve (pure)
curve_operations  answers `curves.list` and `curves.put`
serving_operations  answers `served.list`, `served.add` and `served.remove`
"""
