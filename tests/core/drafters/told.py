"""Requests as the tests of both look-up drafters notify them."""

# Two samples of one prompt, and one of another.
A, B, OTHER = (0, "p", 0, 0), (0, "p", 1, 0), (0, "q", 0, 0)


def told(drafter, key, response, prompt=()):
    """The drafter after `key` was opened and generated `response`."""
    drafter.open(key, prompt)
    drafter.extend(key, response)
    return drafter


def whole_and_in_pieces(make, texts):
    """The keys of `texts`, and two drafters that were notified of all of them."""
    keys = [(0, "p", n, 0) for n in range(len(texts))]
    drafters = [make(), make()]
    for key, text in zip(keys, texts, strict=True):
        for drafter in drafters:
            told(drafter, key, text, prompt=[1, 2])
    return keys, *drafters
