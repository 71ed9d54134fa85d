"""Who computes what: the ledger of samples, quotas and leases. PURE; hub and plan use the same formulas."""
