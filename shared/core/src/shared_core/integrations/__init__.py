"""Bridges to other libraries, each imported by its own name and only where that library is installed."""
