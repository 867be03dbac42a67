"""Errors of the methods on real models and real text."""
