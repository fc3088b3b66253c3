"""Engines: they answer calls. Each backend is imported where it is used, so that none costs what it does not need."""
