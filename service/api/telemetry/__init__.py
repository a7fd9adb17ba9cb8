"""Metrics, logs, traces, and the worker processes."""
