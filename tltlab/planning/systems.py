"""The table of systems from the literature, one row each: compositions of the core's parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tltlab.coordination.progress import SpotTraining
from tltlab.drafters.specs import SYSTEM_DRAFTERS
from tltlab.errors import ConfigError, did_you_mean
from tltlab.own import split
from tltlab.policies.policy import Activation

from .composition import (
    Admission,
    EarlierEpoch,
    LadderStep,
    Regrouped,
    SharedBuffer,
    System,
    Truncated,
    accept_length_ladder,
    accepted_thresholds,
    batch_size_table,
    beg_mab,
    doubling,
    hedge,
    length_aware,
    marginal,
    throughput_budget,
)

_TLT_LADDER = (
    LadderStep(min_batch=1, trees=((8, 4, 48), (4, 4, 48)), chains=(8, 4)),
    LadderStep(min_batch=2, trees=((8, 4, 32), (4, 4, 32)), chains=(6, 3)),
    LadderStep(min_batch=5, trees=((8, 4, 16), (4, 4, 16)), chains=(4, 2)),
    LadderStep(min_batch=21, trees=((8, 4, 8), (4, 4, 8)), chains=(2, 1)),
)
_TLT_ACTIVATION = Activation(max_requests=32, count="running", hold_iterations=10)
_TLT_ARMS = (
    "two strategies a bucket: the released configuration has one, depth 8 and top-k 4, with which its bandit has "
    "nothing to choose; half that depth is added",
    "chains for a drafter without trees: depths 8, 6, 4, 2 and half of them from 1, 2, 5 and 21 requests on",
)

_STREAM = (
    "the trace's prompts repeat when all have been begun; a pass through it goes before the one that counts; "
    "workers notice the end of a step within 64 iterations"
)

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            name="verl", title="VeRL", source="HybridFlow (arXiv 2409.19256), the baseline of arXiv 2511.16665",
            algorithm="each worker decodes its share of the batch plainly until the last response has ended",
            exact=("one engine per worker, synchronous: an RL step ends with its longest worker",),
            assumptions=("a static split: request i of N runs on worker i * W // N until it is done",),
        ),
        System(
            name="open-r1", title="Open-R1", source="TRL with vLLM on separate GPUs, a baseline of arXiv 2511.16665",
            algorithm="generation and training on separate GPUs, each waiting for the other",
            exact=("GPUs of one side are idle while the other works",), topology="separate", generating_share=0.5,
            assumptions=(
                "half of the GPUs generate and half train, as many in all as the other systems have: the paper does "
                "not state the split",
                "synchronous: generation waits for the new weights",
                "log-probs and training take inversely as long on fewer GPUs, where the stage costs count GPUs at all",
            ),
        ),
        System(
            name="tlt", title="TLT",
            source="arXiv 2511.16665, section 3; settings of its released code (mit-han-lab/fastrl)",
            algorithm="Algorithm 1 (BEG-MAB): with 1 - epsilon the best median of accepted tokens x batch / seconds of "
            "a bucket, below a threshold of running requests; idle workers train the drafter",
            exact=("Algorithm 1 with its reward and window", "the threshold and the hold before speculation begins"),
            drafters=("learned", "ngram"), ladder=_TLT_LADDER, selector=beg_mab, activation=_TLT_ACTIVATION,
            specs=(("ngram", SYSTEM_DRAFTERS["tlt-base"]),), idle_use=SpotTraining(),
            assumptions=(
                *_TLT_ARMS,
                "buckets from 1, 2, 5 and 21 requests, epsilon 0.1, window 300 and 10 iterations below the threshold "
                "of 32 before speculation begins: the released code's, the paper gives no values",
            ),
        ),
        System(
            name="tlt-base", title="TLT-Base", source="arXiv 2511.16665, section 5: the model-free drafter alone",
            algorithm="as TLT with n-grams of the group's own text; nothing is trained",
            exact=("Algorithm 1 with its reward and window",), drafters=("ngram",), ladder=_TLT_LADDER,
            selector=beg_mab, activation=_TLT_ACTIVATION, specs=(("ngram", SYSTEM_DRAFTERS["tlt-base"]),),
            assumptions=(
                "activation, buckets and bandit as in TLT",
                *_TLT_ARMS[1:],
                "linear drafts, matches of 2 to 5 tokens in the group: not published",
            ),
        ),
        System(
            name="das", title="DAS", source="arXiv 2511.13841",
            algorithm="equations 7 to 9 with 1 / k for k: p = -(l / alpha) ln(1 - (1 - N / l) / k), the N that least "
            "c_base N + c_tok sum p asks for",
            exact=("the optimum of its objective, by bisection", "classes move up as a response grows"),
            drafters=("suffix",), ladder=(LadderStep(min_batch=1, chains=(8,)),), budget=length_aware,
            specs=(("suffix", SYSTEM_DRAFTERS["das"]),),
            assumptions=(
                "length classes are terciles and budgets the corrected optimum of its equations 7 to 9: neither class "
                "borders nor the budgets of the classes are published",
                "at most 8 tokens a draft, a window of 16 responses per problem",
                "c_base and c_tok fitted to the cost model",
            ),
        ),
        System(
            name="vllm-dynamic", title="vLLM dynamic SD", source="vLLM's num_speculative_tokens_per_batch_size",
            algorithm="a table [lo, hi, k] of draft lengths by the number of running requests",
            exact=("one k for the whole batch, from the table",), drafters=("learned",),
            ladder=(
                LadderStep(min_batch=1, chains=(8,)),
                LadderStep(min_batch=5, chains=(4,)),
                LadderStep(min_batch=17, chains=(2,)),
                LadderStep(min_batch=33),
            ),
            selector=batch_size_table,
            assumptions=(
                "the table is the user's to write: 8 tokens up to 4 requests, 4 up to 16, 2 up to 32, then none",
                "a static drafter, not trained during the run",
            ),
        ),
        System(
            name="vllm-static", title="vLLM static SD",
            source="vLLM's num_speculative_tokens, and its table under data parallelism",
            algorithm="k = 3 at every batch size", exact=("the same k for every request and batch",),
            drafters=("learned",), ladder=(LadderStep(min_batch=1, chains=(3,)),),
            assumptions=("k = 3, the best of NeMo-RL's sweep (NVIDIA 2604.26779)", "a static drafter"),
        ),
        System(
            name="vllm-adaptive", title="vLLM adaptive verification",
            source="vLLM's enable_adaptive_verification (pull requests 47808 and 52228)",
            algorithm="draft slots ranked by the chance that they are kept; the batch verifies as many of the best as "
            "yield the most tokens per second",
            exact=("the ranking, the number of slots, and drafts of full depth however few slots are verified",),
            drafters=("learned",), ladder=(LadderStep(min_batch=1, chains=(7,)),), budget=throughput_budget,
            assumptions=(
                "7 drafted tokens, as in its announcement, which is of a block drafter: a chain drafter makes 7 passes",
                "the cost model replaces the curve that vLLM profiles at its start",
                "a slot's chance is a geometric one of its request's recent acceptance: vLLM's confidence head also "
                "distinguishes drafts of one request, so it gains more",
                "at least one token a request is verified, or none of the batch: else acceptance is not measured",
                "vLLM refuses output log-probs with it, which RL trains on; engines here return them",
            ),
        ),
        System(
            name="sglang-adaptive", title="SGLang adaptive SD",
            source="SGLang's adaptive steps (pull requests 21599, 24055, 23336), defaults of its main branch",
            algorithm="steps by an exponential average of accepted tokens in ranges of batch sizes, with hysteresis",
            exact=("ranges from 1, 8, 32 and 64 requests, their steps, weight, warm-up and hysteresis",),
            drafters=("learned",),
            ladder=(
                LadderStep(min_batch=1, chains=(1, 3, 5, 7)),
                LadderStep(min_batch=8, chains=(0, 1, 3)),
                LadderStep(min_batch=32, chains=(0, 1)),
                LadderStep(min_batch=64, chains=(0,)),
            ),
            selector=accepted_thresholds,
            assumptions=("each range begins with the middle of its steps; batches are not padded to captured sizes",),
        ),
        System(
            name="sglang-tiers", title="SGLang tiers",
            source="SGLang's steps by batch size before it has seen acceptance (pull request 24055)",
            algorithm="a number of steps by the number of running requests", exact=("the tiers",),
            drafters=("learned",),
            ladder=(
                LadderStep(min_batch=1, chains=(3,)),
                LadderStep(min_batch=64, chains=(2,)),
                LadderStep(min_batch=128, chains=(1,)),
            ),
            selector=batch_size_table,
            assumptions=(
                "the tiers stand still: SGLang moves within a range, as in its adaptive row",
                "a static drafter",
            ),
        ),
        System(
            name="hedgespec", title="HedgeSpec", source="Not-a-Bandit (arXiv 2510.20064)",
            algorithm="every drafter is scored on the text that the target verified; Hedge weights exp(-eta sum loss) "
            "over drafters",
            exact=("exponential weights over whole drafters, with the theorem's rate",),
            drafters=("learned", "suffix"), ladder=(LadderStep(min_batch=1, chains=(4,)),), selector=hedge,
            together=True, specs=(("suffix", SYSTEM_DRAFTERS["seer"]),),
            assumptions=(
                "one learned drafter and text of siblings: the paper has drafters by domain",
                "one choice for the batch, where the paper weighs drafters for each query",
                "4 tokens a draft; the weights' rate is the theorem's, sqrt(8 ln N / t)",
                "only the drafter that drafted is scored, as engines do (Exp3); the paper scores all of them",
            ),
        ),
        System(
            name="dvi", title="DVI", source="arXiv 2510.05421",
            algorithm="the target's first layers draft, verified positions train the draft head online",
            exact=("no drafter besides the target: drafting costs a share of the target pass",), drafters=("learned",),
            ladder=(LadderStep(min_batch=1, chains=(4,)),), draft_pass_share=0.15, online_updates=100,
            assumptions=(
                "a drafted token takes 0.15 of a plain pass (the share of the layers that draft), which is added to "
                "verification: the paper's reuse of their hidden states is not credited",
                "100 updates an RL step during decoding, at no cost; one policy for the whole rollout",
                "4 tokens a draft; acceptance as an EAGLE drafter's of that training",
            ),
        ),
        System(
            name="diffuspec", title="DiffuSpec", source="arXiv 2510.02358",
            algorithm="a diffusion model drafts a block in one pass; its length follows the accepted one",
            exact=("drafting time does not grow with the block's length",), drafters=("learned",),
            ladder=(LadderStep(min_batch=1, chains=(4, 8, 16)),), selector=accept_length_ladder,
            draft_pass_share=0.25, block_drafts=True,
            assumptions=(
                "a block takes a quarter of a plain pass at the same batch: a 7B drafter beside a 32B target",
                "acceptance as a chain drafter's: the paper reports speed-ups and no survival by position",
                "blocks of 4, 8 and 16 tokens for its range from k_min to k_max",
            ),
        ),
        System(
            name="seer-drafts", title="Seer's grouped drafts",
            source="arXiv 2511.14617, grouped speculative decoding alone",
            algorithm="Algorithm 1 (MBA), T_SD = (1 - a)(D + T) / (1 - a^(g + 1))",
            exact=("Algorithm 1 as printed, gamma_max 8, lambda 2", "acceptance by finished siblings, its table"),
            drafters=("suffix",), ladder=(LadderStep(min_batch=1, chains=(8,)),), budget=marginal,
            specs=(("suffix", SYSTEM_DRAFTERS["seer"]),),
            assumptions=(
                "benefit is B (b[g] - b[g + 1]) as printed, though its subscripts were lost",
                "linear drafts; text of siblings that still run does not count",
                "high priority has sample 0 of each group, as its probe",
            ),
        ),
        System(
            name="seer", title="Seer", source="arXiv 2511.14617",
            algorithm="Algorithm 2: a probe of each group first, then the largest L_g, from one buffer; Algorithm 1",
            exact=("the order, L_g the longest finished sample of a group", "as Seer's grouped drafts"),
            drafters=("suffix",), ladder=(LadderStep(min_batch=1, chains=(8,)),), budget=marginal,
            specs=(("suffix", SYSTEM_DRAFTERS["seer"]),), admission=SharedBuffer(),
            assumptions=(
                "an engine takes the next request as soon as its prompt and a chunk of 8K tokens fit; what runs does "
                "not move between engines, which its chunks and pool of KV caches allow where counts differ by "
                "more than 32, and what outgrows memory is prefilled again",
                "probes in the order of the batch, and groups that starve are not served in between",
                "drafting as in its row",
            ),
        ),
        System(
            name="rlhfuse", title="RLHFuse", source="arXiv 2409.13221, fusion of generation and inference",
            algorithm="GPUs that are done generating compute log-probs of responses that have ended",
            exact=("a stage's work waits for its response and a free worker, and is shared by all that are free",),
            fused=True,
            assumptions=(
                "shows in whole RL steps alone, where stage costs are given",
                "work in proportion to tokens; the last samples are not packed on fewer engines, so workers are free "
                "when their own have ended",
                "the fused schedule of its two training pipelines has no place in GRPO",
            ),
        ),
        System(
            name="histospec", title="HistoSpec",
            source="arXiv 2508.18588's released code (He-Jingkai/specRL), drafting alone",
            algorithm="draft length doubles where all of a draft was kept, else it halves, within 2 and 16",
            exact=("the released rule, multiplicative both ways; the paper states AIMD",), drafters=("suffix",),
            ladder=(LadderStep(min_batch=1, chains=(2, 4, 8, 16)),), selector=doubling,
            history=16, specs=(("suffix", SYSTEM_DRAFTERS["histospec"]),),
            assumptions=(
                "one draft length for the batch where the code has one a request",
                "every prompt was visited an epoch before with 16 samples",
            ),
        ),
        System(
            name="rhymerl", title="RhymeRL", source="arXiv 2508.18588",
            algorithm="HistoSpec on rank groups of prompts, longer ones spread over more workers (HistoPipe)",
            exact=("the split into rank groups is the fastest for the given lengths and step times",),
            drafters=("suffix",), ladder=(LadderStep(min_batch=1, chains=(2, 4, 8, 16)),), selector=doubling,
            history=16, specs=(("suffix", SYSTEM_DRAFTERS["histospec"]),), placement="rank_groups", topology="separate",
            generating_share=0.75, max_staleness=1, on_policy=False,
            assumptions=(
                "drafting as in HistoSpec; a prompt's mean length is known from the epoch before",
                "three quarters of the GPUs generate; one step off",
                "workers do not run into the next step one by one (its inter-step tier), nor are outliers migrated",
            ),
        ),
        System(
            name="streamrl", title="StreamRL, synchronous", source="arXiv 2504.15930",
            algorithm="split (N_l, N_r) with the least max of PTL(BS) L ceil(M / BS), longest first in a pool",
            exact=("the search over all splits", "training begins during the rollout"), placement="two_pools",
            topology="separate", streamed=True, generating_share=0.75,
            assumptions=(
                "the longest fifth of the prompts by mean length, of which the ranker finds 0.87",
                "three quarters of the GPUs generate, the split does not change",
                "the trainer takes whole groups as they finish: an advantage needs all samples of a prompt",
            ),
        ),
        System(
            name="streamrl-async", title="StreamRL, one step off", source="arXiv 2504.15930",
            algorithm="as StreamRL, generating the next step while training",
            exact=("the search over all splits", "training begins during the rollout"), placement="two_pools",
            topology="separate", streamed=True, generating_share=0.5, max_staleness=1, on_policy=False,
            assumptions=(
                "as StreamRL, with half of the GPUs generating: both sides work all the time",
                "one update of staleness",
            ),
        ),
        System(
            name="spec-rl", title="SPEC-RL", source="arXiv 2509.23232",
            algorithm="token kept with min(1, l pi_now / pi_old), l = e^0.5, cut at the first rejection",
            exact=("the prefix that is kept ends at the first rejection; the rest is generated",),
            workload=EarlierEpoch(keep=0.9991, leniency=math.exp(0.5)), lossless=False,
            assumptions=(
                "every prompt slot was visited an epoch before, with a response as long as the new one",
                "a token is kept with 0.9991: what reuses 66 % of responses of 1,000 tokens, as reported",
                "verification is a prefill of the kept prefix; the rejected rest is not charged",
            ),
        ),
        System(
            name="spec-rl-exact", title="SPEC-RL, l = 1 with residual",
            source="arXiv 2509.23232 at l = 1, the first token after the cut from the residual distribution (issue 14)",
            algorithm="token kept with min(1, pi_now / pi_old), then norm(max(0, pi_now - pi_old))",
            exact=("the prefix that is kept ends at the first rejection; the rest is generated",),
            workload=EarlierEpoch(keep=0.996, residual="exact"),
            assumptions=(
                "every prompt slot was visited an epoch before, with a response as long as the new one",
                "a token is kept with 0.996: what a speed-up of 1.22 at l = 1 amounts to on 1,000 tokens",
                "old distributions at the cut are available; verification is a prefill of the kept prefix",
            ),
        ),
        System(
            name="dler", title="DLER (workload)", source="arXiv 2510.15110",
            algorithm="responses truncated at a fixed length, beyond which there is no reward",
            exact=("responses end at the limit",), workload=Truncated(share=0.125),
            assumptions=(
                "an eighth of the cap, early in training: lengths pile up there",
                "rounds of dynamic sampling are not simulated",
            ),
        ),
        System(
            name="brorl", title="BroRL (workload)", source="arXiv 2510.01180", algorithm="many samples of few prompts",
            exact=("as many responses in all",), workload=Regrouped(factor=4),
            assumptions=("four times the samples of a quarter of the prompts, drawn from their own lengths",),
        ),
        System(
            name="april", title="APRIL", source="arXiv 2509.18521; THUDM/slime",
            algorithm="begin N' > N, stop at N, keep what is unfinished and resume it first",
            exact=("which responses begin, stop and continue",), admission=Admission(issue=1.5), lossless=False,
            on_policy=False,
            assumptions=(
                "one and a half times the prompts; a step counts whole groups",
                "prefixes are prefilled again",
                _STREAM,
            ),
        ),
        System(
            name="copris", title="CoPRIS", source="arXiv 2511.05589; 777pomingzi/CoPRIS",
            algorithm="N' responses in flight; stop with as many groups as are trained, resume what is left first",
            exact=("which responses begin, stop and continue",), admission=Admission(concurrency=1.5), lossless=False,
            on_policy=False,
            assumptions=(
                "in flight are 1.5 times the responses that a step trains (1024 to 512 in its scripts are 2)",
                "the pass for the log-probs of prefixes is not charged",
                _STREAM,
            ),
        ),
        System(
            name="rollpacker", title="RollPacker", source="arXiv 2509.21009; Farrrrland/RollPacker",
            algorithm="short rounds of 1.25 P prompts x 1.25 R samples keep the first P x R; losers run in long rounds",
            exact=("which prompts win, and when a long round comes",),
            admission=Admission(issue=1.25, samples=1.25, leftover="restart"),
            assumptions=(
                "samples beyond a trace's group have lengths drawn from their prompt's own",
                "no change of tensor parallelism, no training during the rollout",
                _STREAM,
            ),
        ),
        System(
            name="one-step-off", title="One step off", source="arXiv 2410.18252; verl's one_step_off_policy",
            algorithm="engines generate the responses of step k + 1 while step k is trained",
            exact=("an RL step trains on responses of the weights one update before its own",), topology="separate",
            generating_share=0.5, max_staleness=1, on_policy=False,
            assumptions=("half of the GPUs generate and half train", "a rollout takes the weights that it begins with"),
        ),
        System(
            name="areal", title="AReaL", source="arXiv 2505.24298; inclusionAI/AReaL",
            algorithm="begin min(most - running, (eta + version + 1) batch - (accepted + running))",
            exact=("the bound on what may begin", "prefixes are prefilled again under every new version"),
            admission=Admission(unit="response", concurrency=2.0, staleness=4), topology="separate",
            generating_share=0.75, max_staleness=1, lossless=False, on_policy=False,
            assumptions=(
                "eta 4, twice a step's responses in flight at most, three quarters of the GPUs generate",
                "weights change when a batch is complete; training overlaps with one step of generation",
                _STREAM,
            ),
        ),
    )
}  # fmt: skip
"""The rows, by name."""


def find_systems(names: str | Sequence[str | System] = "all") -> tuple[System, ...]:
    """The systems of "all", of names with commas between, or of a sequence; ConfigError for an unknown or double name.

    >>> [system.title for system in find_systems("verl,tlt")]
    ['VeRL', 'TLT']
    """
    if isinstance(names, str):
        names = list(SYSTEMS) if names.strip() == "all" else split(names)
    systems = tuple(name if isinstance(name, System) else find_system(name) for name in names)
    chosen = [system.name for system in systems]
    if not chosen:
        raise ConfigError(f"no system given; there are {', '.join(SYSTEMS)}, or all")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"a system is given twice: {', '.join(chosen)}")
    return systems


def find_system(name: str) -> System:
    """Return the row of that name; ConfigError for an unknown one."""
    if name not in SYSTEMS:
        raise ConfigError(f"no system named {name!r}{did_you_mean(name, SYSTEMS)}; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
