"""Training of a drafter, one optimizer step at a time, alone or with other workers; it can be left after each."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tltlab.errors import RunError
from tltlab.records import Json, frozen
from tltlab.runtime.recipe.drafter import LossConfig, OptimConfig
from tltlab.runtime.run.memory import tensor_bytes

from .group import DrafterGroup
from .heads.head import DrafterHead, check_tensors, host_copies
from .heads.loss import drafter_loss
from .heads.target import FrozenTarget, Tensors
from .sequences import TrainingSequence, pack

KEEP_EVERY = 100
"""Updates between backup copies of the state; a 7B model's head has 3 GB of it."""
MAX_BAD = 3
"""Failed updates in a row after which training restores the backup and stops."""
MOMENTS = ("exp_avg", "exp_avg_sq")
PART_ROWS = {"cpu": 512, "cuda": 4096}
"""Rows of one pass, by device: after each a member may leave. On a CPU small passes are no slower. A GPU processes that
many rows of a 7B model's head in an engine's iteration.
"""
_WARM_UP_ROWS = 64


@frozen
class UpdateReport:
    """One update, the same for all members except what is their own.

    `loss`, of the texts trained on, is a mean over all members' rows, and `tokens`, those that counted, are a sum. Both
    are 0 where nothing was applied: no member had data, or the update was `skipped`, since some loss, gradient or new
    weight was not finite. `leave`: some member wants to leave, so all do now. This member's own part was
    over `own_rows` of `own_sequences`.
    """

    loss: float = 0.0
    tokens: int = 0
    skipped: bool
    leave: bool
    own_rows: int = 0
    own_sequences: int = 0


@frozen
class Acceptance:
    """Acceptance rate by unrolled step, given that earlier tokens were kept, as a mean over `rows`; empty without data.

    `DrafterLoss.accept` and `reached`, at the rollout's temperature.
    """

    chances: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


UNKNOWN = Acceptance()


def pooled(measured: Iterable[Acceptance]) -> list[float]:
    """Return the chances of all rows together; [] without data.

    >>> pooled([UNKNOWN, Acceptance(chances=[0.5, 0.0], rows=[2, 0]), Acceptance(chances=[0.75, 0.5], rows=[2, 1])])
    [0.625, 0.5]
    """
    found = [(each.chances, each.rows) for each in measured if each.rows]
    if not found:
        return []
    chances, rows = np.array(found).swapaxes(0, 1)
    means: list[float] = ((chances * rows).sum(0) / np.maximum(rows.sum(0), 1)).tolist()
    return means


@dataclass(slots=True, kw_only=True)
class TrainingPeriod:
    """One training period; fields as in the trace's `spot_training`, and `unsaved` updates.

    `accept` is measured on held-out prompts, after the period.
    """

    rl_step: int
    term: int
    began: float
    members: int = 1
    setup_s: float = 0.0
    train_s: float = 0.0
    wait_s: float = 0.0
    blocked_s: float = 0.0
    yield_s: float | None = None
    updates: int = 0
    unsaved: int = 0
    tokens: int = 0
    sequences: int = 0
    checkpoints: int = 0
    ended: str = "stopped"
    loss: float | None = None
    accept: list[float] | None = None
    detail: str | None = None

    def learned(self, report: UpdateReport) -> None:
        """Count an applied update."""
        self.updates += 1
        self.unsaved += 1
        self.tokens += report.own_rows
        self.sequences += report.own_sequences
        self.loss = report.loss

    def row(self, worker: int, rl_step_began: float, freed: float) -> Json:
        """Return the row of the trace; times are of `time.perf_counter`."""
        row = asdict(self) | {
            "worker": worker,
            "t_start": max(self.began - rl_step_began, 0.0),
            "duration": freed - self.began,
        }
        return {name: value for name, value in row.items() if name not in ("began", "unsaved")}


class HeadTraining:
    """A head and AdamW on it, in float32; on CUDA the passes run in bfloat16.

    The head always holds finite weights that result from finite gradients, so it can be served between updates. Members
    of a group that begin with the same state (`share`) end every update with the same state.

    >>> training = HeadTraining(head, frozen, LossConfig(), OptimConfig(lr=1e-3), "cpu")         # doctest: +SKIP
    >>> training.update(buffer.sample(4096, rng)).loss                                              # doctest: +SKIP
    0.61
    """

    def __init__(
        self,
        head: DrafterHead,
        frozen: FrozenTarget,
        loss: LossConfig,
        optim: OptimConfig,
        device: torch.device | str = "cpu",
        *,
        temperature: float = 1.0,
    ):
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        self.temperature = temperature
        self.head = head.to(self.device, torch.float32)
        self.loss, self.optim = loss, optim
        self.updates = 0
        self.skipped = 0
        self._bad = 0
        self._named = {name: value for name, value in self.head.named_parameters() if value.requires_grad}
        self._params = list(self._named.values())
        self._adam = torch.optim.AdamW(
            self._params, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        for value in self._params:
            self._adam.state[value] = {
                "step": torch.zeros((), device=self.device),
                **{name: torch.zeros_like(value, memory_format=torch.contiguous_format) for name in MOMENTS},
            }
        self._message = _Message(self._params, self.device)
        self.set_target(frozen)
        state = self.live_state()
        # On the device if it keeps as much memory free.
        on_host = self._cuda and torch.cuda.mem_get_info(self.device)[0] < 2 * tensor_bytes(state.values())
        self._backup = {
            name: torch.empty_like(value, device="cpu" if on_host else None, pin_memory=on_host)
            for name, value in state.items()
        }
        self._save_backup()

    def set_target(self, frozen: FrozenTarget) -> None:
        """Use this embedding and LM head of the target from now on."""
        self.frozen = frozen.to(self.device, torch.bfloat16 if self._cuda else torch.float32)

    def update(
        self,
        sequences: Sequence[TrainingSequence],
        group: DrafterGroup | None = None,
        *,
        leave: Callable[[], bool] = lambda: False,
    ) -> UpdateReport:
        """Take one optimizer step on the sequences of all members, weighted by the tokens they predict.

        Members with parts of a batch therefore compute the same as one with all of it: exactly where one step is
        trained. Unrolled steps have fewer tokens than the first and are weighted by the first's. A member without data
        has no weight. `leave` returns True if this member has to leave, and is called after each pass over
        `PART_ROWS` rows and just before the exchange. A member that leaves contributes its result so far, and all leave
        after the current update.

        Where a loss or gradient of any member is not finite, no member applies the update. Where the step makes weights
        that are not finite, all restore the last backup, of at most `KEEP_EVERY` updates ago. After three such updates
        in a row all restore it and raise RunError. Raises GroupLost where a member is lost: nothing was
        applied.
        """
        message = self._message
        message.clear()
        used = self._fill_message(sequences, leave)
        message.leave.fill_(leave())
        if group is not None:
            group.sum(message.flat)
        tokens = int(message.tokens)
        bad = bool(message.bad > 0) or not bool(message.flat.isfinite().all())
        if tokens and not bad:
            message.gradient.div_(tokens)
            norm = float(torch.linalg.vector_norm(message.gradient))
            # The norm of finite gradients may overflow: clipping by it would make them zeros.
            bad = not (math.isfinite(norm) and self._apply(norm))
        report = UpdateReport(
            skipped=bad,
            leave=bool(message.leave > 0),
            own_rows=sum(sequence.num_rows for sequence in used),
            own_sequences=len(used),
        )
        if bad:
            self._note_failure()
        if bad or not tokens:
            return report
        return replace(report, loss=float(message.loss / tokens), tokens=tokens)

    def warm_up(self) -> None:
        """Run and undo an update on random states: a process's first update waits for libraries and kernels.

        On an H100 it took 2 to 4 s, and the rollout in which it began waited for it (traces/h100-smoke).
        """
        before = self.state_dict()
        generator = torch.Generator().manual_seed(0)
        vocabulary, hidden = self.frozen.embedding.shape
        layers = len(self.head.aux_layers)
        states, aux = (torch.randn(_WARM_UP_ROWS, n * hidden, generator=generator) for n in (1, layers))
        token_ids = torch.randint(0, vocabulary, (_WARM_UP_ROWS + 1,), generator=generator)
        made_up = TrainingSequence(key=(-1, "", 0, 0), token_ids=token_ids, hidden=states, aux=aux if layers else None)
        self.update([made_up])
        self.load_state_dict(before)

    def predict(self, sequences: Sequence[TrainingSequence], head: DrafterHead | None = None) -> Acceptance:
        """Return the acceptance of the trained head, or of `head`.

        The estimate is unbiased on prompts that were not trained on.
        """
        teaching = [sequence for sequence in sequences if sequence.teaches]
        if not teaching:
            return UNKNOWN
        with torch.no_grad(), self.autocast():
            batch = pack(teaching, self.device)
            found = drafter_loss(head or self.head, self.frozen, batch, self.loss, temperature=self.temperature)
        return Acceptance(chances=found.accept, rows=found.reached)

    def share(self, group: DrafterGroup) -> None:
        """Take the leader's weights, moments and counters; all members call it when a group has formed.

        Raises GroupLost, with this member's state unchanged, where a member is lost.
        """
        tensors = list(self._tensors().values())
        flat = torch.cat([value.detach().flatten() for value in tensors])
        counters = self._counters().to(self.device)
        group.broadcast(flat)
        group.broadcast(counters)
        with torch.no_grad():
            for value, part in zip(tensors, torch.split(flat, [value.numel() for value in tensors]), strict=True):
                value.copy_(part.view_as(value))
        self._set_counters(counters)
        self._save_backup()

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of `live_state` on the host."""
        return host_copies(self.live_state())

    def held_bytes(self) -> dict[str, int]:
        """Bytes of its tensors, by the names of a dry run's parts."""
        return {
            "drafter, training": tensor_bytes([*self._tensors().values(), self._message.flat]),
            "drafter, kept state": tensor_bytes(self._backup.values()),
            "drafter's target": tensor_bytes([self.frozen.embedding, self.frozen.lm_head]),
        }

    def live_state(self) -> dict[str, Tensor]:
        """Return trained weights, moments and counters, without the target's; the tensors change with updates.

        `head.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME` of each parameter, and `counters`.
        """
        return {name: value.detach() for name, value in self._tensors().items()} | {"counters": self._counters()}

    def load_state_dict(self, state: Tensors) -> None:
        """Continue from a state. ConfigError for one of another head."""
        check_tensors("not a training state of this drafter", self.live_state(), state)
        self._restore(state)
        self._save_backup()

    def _fill_message(
        self, sequences: Sequence[TrainingSequence], leave: Callable[[], bool]
    ) -> Sequence[TrainingSequence]:
        """Write this member's sums to the message: gradient and losses times tokens, or the failure flag.

        Return the sequences included: those that teach, or as many as there was time for.
        """
        message = self._message
        teaching = [sequence for sequence in sequences if sequence.teaches]
        done = 0
        while done < len(teaching) and not (done and leave()):
            part = _first(teaching[done:], PART_ROWS[self.device.type])
            done += len(part)
            with self.autocast():
                result = drafter_loss(self.head, self.frozen, pack(part, self.device), self.loss)
            if not result.rows:
                continue
            # Gradients accumulate in the message itself, which members exchange.
            (result.loss * result.rows).backward()
            if not bool(result.loss.isfinite()) or not bool(message.gradient.isfinite().all()):
                message.clear()
                message.bad.fill_(1.0)
                break
            message.loss.add_(result.loss.detach() * result.rows)
            message.tokens.add_(result.rows)
        return teaching[:done]

    def _apply(self, norm: float) -> bool:
        """Clip and step; where the step makes weights that are not finite restore the backup and return False."""
        if self.updates % KEEP_EVERY == 0:
            self._save_backup()
        self._message.gradient.mul_(min(1.0, self.optim.max_grad_norm / (norm + 1e-6)))
        warm = min(1.0, (self.updates + 1) / max(1, self.optim.warmup))
        for settings in self._adam.param_groups:
            settings["lr"] = self.optim.lr * warm
        self._adam.step()
        norms = torch.stack(torch._foreach_norm([value.detach() for value in self._params]))
        if not bool(norms.isfinite().all()):
            self._restore_backup()
            return False
        self.updates += 1
        self._bad = 0
        return True

    def _note_failure(self) -> None:
        self.skipped += 1
        self._bad += 1
        if self._bad < MAX_BAD:
            return
        self._restore_backup()
        self._bad = 0
        raise RunError(
            f"{MAX_BAD} drafter updates in a row met a loss, gradient or weight that is not finite; the drafter is "
            f"back at update {self.updates}: lower its learning rate, or look for NaN in the hidden states"
        )

    def _save_backup(self) -> None:
        for name, value in self.live_state().items():
            self._backup[name].copy_(value)

    def _restore_backup(self) -> None:
        bad, skipped = self._bad, self.skipped
        self._restore(self._backup)
        self._bad, self.skipped = bad, skipped

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {f"head.{name}": value for name, value in self._named.items()}
        for moment in MOMENTS:
            tensors.update({f"{moment}.{name}": self._adam.state[value][moment] for name, value in self._named.items()})
        return tensors

    def _counters(self) -> Tensor:
        steps = int(self._adam.state[self._params[0]]["step"])
        return torch.tensor([self.updates, self.skipped, self._bad, steps])

    def _set_counters(self, counters: Tensor) -> None:
        self.updates, self.skipped, self._bad, steps = map(int, counters)
        for value in self._params:
            self._adam.state[value]["step"].fill_(steps)

    @torch.no_grad()
    def _restore(self, state: Tensors) -> None:
        for name, value in self._tensors().items():
            value.copy_(state[name])
        self._set_counters(state["counters"])

    def autocast(self) -> torch.autocast:
        """Return the precision of passes: bfloat16 on CUDA."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._cuda)


def _first(sequences: Sequence[TrainingSequence], most_rows: int) -> Sequence[TrainingSequence]:
    """Return the first sequences, as many as have at most `most_rows` rows in all; at least one."""
    ends = accumulate(sequence.num_rows for sequence in sequences)
    return sequences[: max(1, sum(end <= most_rows for end in ends))]


class _Message:
    """The sums that members exchange, in one flat tensor of float32: gradients, then a few scalars. Parts are views."""

    def __init__(self, params: Sequence[torch.nn.Parameter], device: torch.device):
        size = sum(value.numel() for value in params)
        self.flat = torch.zeros(size + 4, device=device)
        self.gradient, single = self.flat[:size], self.flat[size:]
        self.loss, self.tokens, self.bad, self.leave = single.unbind()
        begin = 0
        for value in params:
            value.grad = self.gradient[begin : begin + value.numel()].view_as(value)
            begin += value.numel()

    def clear(self) -> None:
        self.flat.zero_()
