"""The choice of a request's replica: reports of the replicas, and the plan made from them."""
