"""Mechanisms beside the core, one in each module: what a call asks for is imported with that call.

None of them is named by a branch of the core; each enters by a protocol that is open to others.
"""
