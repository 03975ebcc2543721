"""Who may come in, and how much each may bring: keys, limits, the budget for bodies, TLS."""
