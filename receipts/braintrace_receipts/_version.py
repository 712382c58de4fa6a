"""The version of the verifier, kept in this one place."""

__version__ = '0.1.0'
