"""Attention backends, one a file: a module with `BACKEND`, its capability record and its function.

`pcp_compiler.plan.capabilities` lists and loads them by name; those of other packages come by entry point.
"""
