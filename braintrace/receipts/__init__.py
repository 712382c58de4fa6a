"""A training step that someone else can check: receipts, and a verifier in NumPy."""
