"""The A2A server under /a2a: every agent of the society as an agent of the A2A protocol, version 1.0."""
