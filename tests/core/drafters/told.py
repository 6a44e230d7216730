"""Requests as the tests of both look-up drafters notify them."""

# Two samples of one prompt, and one of another.
A, B, OTHER = (0, "p", 0, 0), (0, "p", 1, 0), (0, "q", 0, 0)


def told(drafter, key, response, prompt=()):
    """The drafter after `key` was opened and generated `response`."""
    drafter.open(key, prompt)
    drafter.extend(key, response)
    return drafter
