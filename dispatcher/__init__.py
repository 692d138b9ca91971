"""Who is next, and where: one leader per model, fair between tenants, bound by credit."""
