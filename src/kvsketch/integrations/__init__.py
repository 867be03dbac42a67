"""Bridges to other people's tools; each imports its tool only when it is imported itself."""
