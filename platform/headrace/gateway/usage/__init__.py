"""Usage that can be billed: the durable ledger of the replicas' totals, and its routes."""
