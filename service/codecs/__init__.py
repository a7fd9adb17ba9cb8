"""Bytes <-> tensors; one module for each wire format."""
