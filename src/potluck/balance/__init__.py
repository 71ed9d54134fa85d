"""Who computes what: the ledger of samples, quotas and leases. PURE: hub and plan count with it."""
