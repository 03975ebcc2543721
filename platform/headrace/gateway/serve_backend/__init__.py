"""Requests of the gateway to the cluster, over Ray Serve's handles of the app's deployments."""
