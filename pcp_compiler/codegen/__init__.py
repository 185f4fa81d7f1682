"""Printing a graph as readable Python that runs."""
