"""Where responses end that have stop strings: against a search of their whole text, token by token."""

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tltlab.runtime.drafter.offline.data import load_tokenizer
from tltlab.runtime.engine.stops import StopStrings

CAP = 40


@pytest.fixture(scope="module")
def of_bytes():
    """Tokens of one or more bytes, characters cut in the middle among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["the end. the end\n\nof it é è é. <end> ends\n\n. <answer>"] * 20
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def ended(stops, prompt, prefix, tokens, sizes):
    """The number of tokens up to a stop, which come `sizes` at a time as with drafts; None without one."""
    start = 0
    for size in sizes:
        before = [*prompt, *prefix, *tokens[:start]]
        counts = {"num_tokens": len(before), "num_output_tokens": start, "max_tokens": CAP - len(prefix)}
        num = stops.completed(SimpleNamespace(all_token_ids=before, **counts), tokens[start : start + size])
        if num is not None:
            return start + num
        start += size
    return None


def searched(tokenizer, tokens, strings):
    texts = (tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1))
    return next((n for n, text in enumerate(texts) if any(stop in text for stop in strings)), None)


@pytest.mark.parametrize("strings", [("\n\n",), ("end", ". <"), ("é",), ("<answer>", " of ")])
def test_a_stop_ends_at_the_token_that_completes_it(of_bytes, strings):
    rng = np.random.default_rng(0)
    texts = ["the end", "\n", "\n\n", " é", "<an", "swer>", "of it ", ". ", "<end>", "è", "x"]
    prompt = of_bytes.encode("the end\n\n<answer> of é. <")
    found = []
    for _ in range(300):
        tokens = [token for _ in range(8) for token in of_bytes.encode(texts[rng.integers(len(texts))])]
        # Half a character, and the rest of it later.
        tokens = [token for token in tokens if rng.random() > 0.05]
        expected = searched(of_bytes, tokens, strings)
        if expected is None or expected > 3:  # others are not continued
            found.append(
                ended(StopStrings(strings, of_bytes, CAP), prompt, tokens[:3], tokens[3:], rng.integers(1, 6, 99))
            )
            assert found[-1] == (expected and expected - 3)
    assert min(found.count(None), len(found) - found.count(None)) > 20


def test_words_and_special_tokens_are_text(random_model):
    tokenizer = load_tokenizer(str(random_model))
    tokens = tokenizer.encode("w1 w2 w13 <pad> w3 w1", add_special_tokens=False)
    for stop, num in (("w2 w1", 3), ("w13 ", 4), ("d> w", 5), ("w3 w1 w", None), ("w2", 2)):
        stops = StopStrings((stop,), tokenizer, CAP)
        assert ended(stops, [5, 6], [], tokens, [2, 4]) == num, stop
