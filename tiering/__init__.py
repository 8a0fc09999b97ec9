"""A hierarchy of byte tiers under budgets: leases, single flight, read-through, write-behind."""
