"""StoreNodes on the machines of a Ray cluster: kept alive and introduced to each other."""
