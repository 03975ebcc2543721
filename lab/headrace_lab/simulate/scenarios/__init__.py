"""Simulations with admission at the gateway, and with a number of engines that changes."""
