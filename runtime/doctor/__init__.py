"""The doctor: what this machine is, whether a group works on it, and a report of both without private data."""
