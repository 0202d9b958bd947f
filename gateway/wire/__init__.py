"""The PostgreSQL protocol as bytes: no socket, no clock, no log, no randomness.

Everything that must be random or timed (nonces, salts, keys) is passed in by the caller.
Manual: part "Internals", chapter "Frontend/Backend Protocol".
"""
