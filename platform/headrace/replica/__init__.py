"""The control plane's part in a replica: its planner, and the results of its plans."""
