"""Runs of training on a server: pushes and pulls of named arrays, whatever the framework."""
