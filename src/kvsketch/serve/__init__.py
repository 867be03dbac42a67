"""Serving a model with compressed caches.

requests.py     what an engine is asked and how it answers: Request, Ticket, Engine
"""
