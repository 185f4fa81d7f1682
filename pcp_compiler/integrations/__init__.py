"""Adapters for other libraries; each is imported by the user who has that library."""
