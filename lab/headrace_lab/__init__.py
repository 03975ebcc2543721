"""Offline work that no server runs: training, conversion, calibration and comparison of models."""
