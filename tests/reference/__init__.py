"""Drives the real Megatron-Core, to make golden files of further settings and releases."""
