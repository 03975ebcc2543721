"""A stream outlives its replica: what an engine has said, told to the gateway and said again."""
