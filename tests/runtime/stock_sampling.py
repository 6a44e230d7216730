"""vLLM's CPU sampler as it ships, without tltlab's repair."""

from functools import partial

from tltlab.runtime.engine.vllm import replaced


def unfixed_sampling():
    """Within the block, engines of this process verify drafts as vLLM's CPU build ships."""
    from vllm.v1.sample import rejection_sampler

    mended = rejection_sampler.expand_batch_to_tokens
    # A new object: `speculative_sampling_is_sound` compares identity.
    stock = partial(getattr(mended, "stock", mended))
    return replaced(rejection_sampler, "expand_batch_to_tokens", stock)
