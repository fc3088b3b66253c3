"""Algorithms as generators: they yield calls and receive replies, do no I/O, and know no model and no clock."""
