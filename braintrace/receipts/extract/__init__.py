"""Observers of steps in other frameworks: one file each, which can be read and copied by itself."""
