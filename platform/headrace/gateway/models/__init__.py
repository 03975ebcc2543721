"""The models of a gateway: what belongs to each, and which of them a request gets."""
