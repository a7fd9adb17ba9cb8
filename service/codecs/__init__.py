"""Bytes <-> tensors: each wire format has a module."""
