"""Resuming streams of lost replicas: replicas send their engines' outputs along with the stream."""
