"""The worker coordinator over ZeroMQ: server, client, wire format, keys, log."""
