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


def ended(stops, prompt, prefix, tokens, chunks, cap=CAP):
    """The tokens up to a stop, arriving in `chunks` as with drafts; all of them where there is none."""
    given, output, left = [*prompt, *prefix], [], list(tokens)
    for size in chunks:
        new, left = left[:size], left[size:]
        request = SimpleNamespace(
            all_token_ids=given + output,
            num_tokens=len(given + output),
            num_output_tokens=len(output),
            max_tokens=cap - len(prefix),
        )
        num = stops.completed(request, new)
        output += new if num is None else new[:num]
        if num is not None:
            break
    return output


def searched(tokenizer, prefix, tokens, strings):
    for n in range(1, len(tokens) + 1):
        text = tokenizer.decode([*prefix, *tokens[:n]], clean_up_tokenization_spaces=False)
        if any(stop in text for stop in strings):
            return list(tokens[:n])
    return list(tokens)


@pytest.mark.parametrize("strings", [("\n\n",), ("end", ". <"), ("é",), ("<answer>", " of ")])
def test_a_stop_ends_at_the_token_that_completes_it(of_bytes, strings):
    rng = np.random.default_rng(0)
    texts = ["the end", "\n", "\n\n", " é", "<an", "swer>", "of it ", ". ", "<end>", "è", "x"]
    prompt = of_bytes.encode("the end\n\n<answer> of é. <")
    num_ended = 0
    for _ in range(300):
        tokens = [token for _ in range(8) for token in of_bytes.encode(texts[rng.integers(len(texts))])]
        # Half a character, and the rest of it later.
        tokens = [token for token in tokens if rng.random() > 0.05]
        if any(stop in of_bytes.decode(tokens[:3]) for stop in strings):
            continue  # such a response is not continued
        expected = searched(of_bytes, tokens[:3], tokens[3:], strings)
        chunks = [*rng.integers(1, 6, 30).tolist(), 99]
        assert ended(StopStrings(strings, of_bytes, CAP), prompt, tokens[:3], tokens[3:], chunks) == expected
        num_ended += len(expected) < len(tokens) - 3
    assert num_ended > 20


def test_words_and_special_tokens_are_text(random_model):
    tokenizer = load_tokenizer(str(random_model))
    tokens = tokenizer.encode("w1 w2 w13 <pad> w3 w1", add_special_tokens=False)
    for stop, num in (("w2 w1", 3), ("w13 ", 4), ("d> w", 5), ("w3 w1 w", 6), ("w2", 2)):
        stops = StopStrings((stop,), tokenizer, CAP)
        assert ended(stops, [5, 6], [], tokens, [2, 4]) == tokens[:num], stop
