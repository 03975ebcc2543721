"""What the processes of one machine say to its StoreNode, and the events that it publishes."""
