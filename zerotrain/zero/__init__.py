"""Sharded model states: units, their layout, when they are whole, and the optimizer over fragments."""
