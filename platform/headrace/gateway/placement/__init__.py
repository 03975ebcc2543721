"""The placement of a request: reports and KV events of replicas, and the plan made from them."""
