"""Systems on real engines: the settings that execute a row's parts, or the part that no engine here has."""

from collections.abc import Iterator

from tltlab.costs.base import CostModel
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError
from tltlab.policies.policy import Policy
from tltlab.records import frozen
from tltlab.strategy import Strategy

from .composition import Admission, EarlierEpoch, LadderStep, SharedBuffer, System, Workload, strategies
from .placement import BY_HISTORY, PLACEMENTS


@frozen
class EngineRun:
    """Settings with which engines execute a system; what it does not have is None, 0 or False.

    `policy` decides on drafts. `drafts_by_network`: it needs a drafter with a network, which idle workers train where
    `trains_drafter`. `admission` decides what an RL step begins and leaves, `workload` what becomes of its responses,
    `staleness` is the bound on updates that one may be behind. `own_gpus`: trainers and engines wait for each other on
    their own GPUs. `placement` is by name; those by expected lengths read earlier epochs. `planner` is the
    name of the one that moves requests.
    `notes` list where engines differ from the row.
    """

    policy: Policy
    drafts_by_network: bool
    trains_drafter: bool
    admission: Admission | None = None
    workload: Workload | None = None
    staleness: int = 0
    one_step_off: bool = False
    own_gpus: bool = False
    placement: str = "contiguous"
    planner: str | None = None
    notes: tuple[str, ...] = ()


def missing_part(system: System) -> str | None:
    """Return a sentence on the parts of a system that no engine here has, None where engines can execute it.

    >>> from tltlab.planning.systems import SYSTEMS
    >>> missing_part(SYSTEMS["copris"])
    >>> missing_part(SYSTEMS["rlhfuse"])
    'no engine here has engines that compute log-probs once their responses have ended'
    """
    parts = " or ".join(_missing_parts(system))
    return f"no engine here has {parts}" if parts else None


def _missing_parts(system: System) -> Iterator[str]:
    if system.block_drafts:
        yield "a drafter that makes a block in one pass"
    elif system.draft_pass_share is not None:
        yield "drafts from the first layers of the target"
    if system.online_updates:
        yield "updates of the drafter while its engine decodes"
    if system.placement not in (*PLACEMENTS, *BY_HISTORY):
        yield f"placement {system.placement!r}"
    if isinstance(system.workload, EarlierEpoch) and system.workload.residual == "exact":
        yield "the old distribution at the cut"
    if system.fused:
        yield "engines that compute log-probs once their responses have ended"


def network_drafter(system: System) -> bool:
    """Return whether one of the system's drafters runs a network."""
    drafters = Drafters(dict(system.specs))
    return any(drafters[name].has_network for name in system.drafters)


def engine_run(system: System, costs: CostModel | None, head: str = "learned") -> EngineRun:
    """Return the settings that execute a system; ConfigError names the part that no engine here has.

    A budget is made from `costs`, which may be None for a system without one. `head` is the name of the engines'
    drafter with a network.
    """
    if missing := missing_part(system):
        raise ConfigError(f"{system.name}: {missing}")
    drafters = Drafters(dict(system.specs))

    def chains(ladder_step: LadderStep) -> Iterator[Strategy]:
        for name in system.drafters:
            drafter, trees = (head, True) if drafters[name].has_network else (name, False)
            arms = [arm for arm in strategies(ladder_step, drafter, trees=trees) if arm.top_k <= 1]
            yield from arms or strategies(ladder_step, drafter, trees=False)

    network = network_drafter(system)
    admission = system.admission if isinstance(system.admission, Admission) else Admission()
    asynchronous = admission.staleness is not None
    one_step_off = system.max_staleness > 0 and not asynchronous
    notes = []
    if network and any(top_k > 1 for ladder_step in system.ladder for _, top_k, _ in ladder_step.trees):
        notes.append("drafts are chains: vLLM verifies no trees")
    if admission.unit == "response":
        notes.append("an RL step trains whole groups, since an advantage needs all samples of a prompt")
    if asynchronous and admission.concurrency is not None:
        notes.append("rollout.vllm.max_num_seqs limits what runs at a time in an engine, not a multiple of the step")
    if system.placement in BY_HISTORY:
        notes.append("lengths are expected from a prompt's responses of the epoch before; the first one is contiguous")
    if system.streamed:
        notes.append("training begins when the rollout has ended: no trainer here begins during it")
    planner = "buffer" if isinstance(system.admission, SharedBuffer) else system.planner
    if planner == "buffer":
        notes.append("what runs does not move between engines, nor is it cut into chunks")
    early = None if asynchronous or admission == Admission() else admission
    if early is not None:
        notes.append("an engine stops once its own share of the prompts that are trained is whole")
    return EngineRun(
        policy=system.policy(chains, costs),
        drafts_by_network=network,
        trains_drafter=system.idle_use is not None,
        admission=early,
        workload=system.workload,
        staleness=admission.staleness or 0,
        one_step_off=one_step_off,
        own_gpus=system.topology == "separate" and not asynchronous and not one_step_off,
        placement=system.placement,
        planner=planner,
        notes=tuple(notes),
    )
