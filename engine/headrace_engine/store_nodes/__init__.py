"""StoreNodes on the machines of a Ray cluster: kept alive and connected to each other."""
