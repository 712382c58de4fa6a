"""Streams that run for months: files, data as they come, numbers that are not finite."""
