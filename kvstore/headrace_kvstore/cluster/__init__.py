"""StoreNodes on the machines of a Ray cluster: keeping them alive, introducing them."""
