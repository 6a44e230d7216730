"""Acceptance models fitted to a trace: by batch, by siblings, by age and training, and the trained length.

A run annotates its responses with the drafter in service and with older ones, so the same text is drafted by drafters
of several ages and numbers of updates. Some texts are easier than others, so each RL step has its own factor, with the
spread of its responses. Drafters are compared on the same text first and across RL steps second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import chain_alpha, from_survival
from tltlab.acceptance.context import USELESS_AT, ContextAcceptance, trained_text
from tltlab.acceptance.curves import SiblingAcceptance
from tltlab.acceptance.freshness import FreshAcceptance, Freshness, MeasuredState
from tltlab.acceptance.measured import BatchBand, FittedDepth, MeasuredAcceptance
from tltlab.arrays import Floats, Ints
from tltlab.drafters.specs import STANDARD, Drafters
from tltlab.errors import ConfigError
from tltlab.records import frozen
from tltlab.traces.drafts import recorded_drafts, walked_drafts
from tltlab.traces.schema import KEY
from tltlab.traces.trace import Trace

BANDS = (4, 16, 48)
"""Upper ends of the batch bands; a last one is open."""
ENOUGH = 64
"""Least request-iterations of a cell; a cell with fewer uses the nearest band with enough."""
_ACCEPTED = "accepted_per_request"
_FOREVER = 1e9
_PRIOR_SD = 2.0
"""How far each parameter may lie from where it starts, in log-odds or logarithms, before data have to pay for it.

So wide that a hundred drafts outweigh it; a parameter that the data do not identify stays where it starts.
"""
_NARROWED = 0.5
"""A parameter counts as identified where the data narrow it to this share of `_PRIOR_SD`."""
_CONFOUNDED = 0.97
"""Correlation from which on the effects of age and of training count as one."""
_STEP_SPREAD = 0.1
"""Relative spread of an RL step's level where no RL step has two responses of the same drafter."""
LEAST_TOKENS = 256
"""Trained lengths below are not looked for: the first tokens of a response are others than later ones."""
_CELL_TOKENS = 128
"""Drafts of one response that begin within so many tokens of each other are counted together."""
_RATIO = 1.03
"""Ratio of neighbouring trained lengths that are tried."""
_MIN_RESPONSES = 8
_SURE = 16.0
"""Deviance by which the best length must be better than none; _SPAN: by which another one may be worse than it."""
_SPAN = 3.84
KINDS = ("by-batch", "siblings", "fresh")
Model = MeasuredAcceptance | ContextAcceptance | SiblingAcceptance | FreshAcceptance
_ASSUMPTION = 'state an assumption: a file {"kind": "fresh", "base": MODEL, "drafter": NAME, "freshness": {...}}'


def fit_acceptance(
    iterations: pd.DataFrame, drafters: Drafters = STANDARD
) -> tuple[MeasuredAcceptance | None, list[str]]:
    """The distribution of accepted tokens and the mean tokens drafted, and notes; None where nothing was speculated.

    One sample is one request in one iteration. The first d tokens of a longer chain are the chain of depth d, so depth
    d also learns from min(accepted, d) of deeper drafts; not where a drafter copies text and depth d has ENOUGH of its
    own (`copied_runs`). Where `accepted_per_request` is unknown only the mean is, and the distribution is the one of a
    chain whose tokens are kept with equal probability. Only whole chains are fitted: trees and trimmed chains are
    counted in a note. Raises ConfigError for a drafter that is not among `drafters`.
    """
    spec = iterations[iterations["draft_depth"] > 0]
    is_whole = (spec["top_k"] == 1) & (spec["tokens_to_verify"] == spec["draft_depth"] + 1)
    whole = spec.loc[is_whole, ["drafter", "draft_depth", "batch", "num_drafted", "num_accepted", _ACCEPTED]]
    notes = []
    if len(whole) < len(spec):
        notes.append(f"acceptance: {len(spec) - len(whole)} iterations with trees or trimmed chains left out")
    number = np.searchsorted(BANDS, whole["batch"])
    copies = drafters.copying(map(str, whole["drafter"].unique()))
    bands: list[dict[str, dict[int, FittedDepth]]] = [{} for _ in range(len(BANDS) + 1)]
    for drafter, depth in whole[["drafter", "draft_depth"]].drop_duplicates().sort_values("draft_depth").to_numpy():
        deep_enough = (whole["drafter"] == drafter) & (whole["draft_depth"] >= depth)
        cells = [_fit(whole[deep_enough & (number == b)], int(depth), copies[str(drafter)]) for b in range(len(bands))]
        for b, fitted in enumerate(_fill(cells)):
            if fitted is not None:
                bands[b].setdefault(str(drafter), {})[int(depth)] = fitted
    if not bands[0]:
        return None, notes
    return MeasuredAcceptance(
        copies=copies,
        bands=tuple(
            BatchBand(max_batch=end, drafters_by_depth=drafters)
            for end, drafters in zip((*BANDS, None), bands, strict=True)
        ),
    ), notes


def _fill(cells: list[FittedDepth | None]) -> list[FittedDepth | None]:
    """Each band's fit, or that of the nearest band with enough samples, or of the one with most."""
    samples = [cell.num_samples or 0 if cell else 0 for cell in cells]
    enough = [b for b, n in enumerate(samples) if n >= ENOUGH] or [int(np.argmax(samples))]
    return [cells[min(enough, key=lambda e: (abs(e - b), e))] for b in range(len(cells))]


def _fit(rows: pd.DataFrame, depth: int, copied: bool) -> FittedDepth | None:
    """Iterations of one drafter in one band, at least `depth` deep, as the chain of that depth; None without any."""
    same_depth = rows[rows["draft_depth"] == depth]
    sample = rows if same_depth.empty else same_depth
    if copied and same_depth["batch"].sum() >= ENOUGH:
        rows = same_depth
    if (requests := int(sample["batch"].sum())) == 0:
        return None
    drafted = float((sample["num_drafted"] * depth / sample["draft_depth"]).sum()) / requests
    drafted = min(drafted, depth)
    if rows[_ACCEPTED].notna().all():
        accepted = np.concatenate(rows[_ACCEPTED].tolist()).astype(np.int64)
        return FittedDepth.counted(accepted, depth, drafted)
    mean = float(np.minimum(sample["num_accepted"], sample["batch"] * depth).sum()) / requests
    alpha = chain_alpha(min(mean, depth), depth)
    p = from_survival(np.power(alpha, np.arange(1, depth + 1, dtype=np.float64)))
    return FittedDepth(accepted=tuple(p.tolist()), drafted=drafted, num_samples=requests)


def fit_freshness(acceptance: pd.DataFrame, drafter: str) -> tuple[Freshness, tuple[str, ...]]:
    """Fit age and training to acceptance.parquet, where it has a drafter at several ages or numbers of updates.

    The notes name parameters that the data hardly narrow, which stay near an assumption.

    A variable that does not vary is not identified: it has no effect, and a note. A drafter's age is the RL step less
    the one that it was published for, so a trend of the text over RL steps is confounded with ageing and training; no
    trend is assumed. Raises ConfigError where neither age nor updates
    vary.
    """
    rows = _tries(drafter_states(acceptance[acceptance["drafter"] == drafter]))
    aging, training = rows["age"].nunique() > 1, rows["updates"].nunique() > 1
    if not (aging or training):
        raise ConfigError(
            f"acceptance.parquet has {drafter or 'the drafter'!r} at one age and number of updates only: freshness "
            f"needs several; annotate the trace with older drafters, or state an assumption"
        )
    likelihood = _FreshnessLikelihood(rows, aging=aging, training=training)
    # Ageing towards a floor far below and towards one just below may both be a local optimum.
    starts: tuple[dict[str, float], ...] = ({}, {"floor": -1.0, "age_steps": np.log(4.0 * (1.0 + rows["age"].max()))})
    solution = min((likelihood.solve(start) for start in starts), key=lambda solution: float(solution.cost))
    chance, freshness = likelihood.model(solution.x)
    unidentified, confounded = likelihood.unidentified(solution.jac)
    notes = [] if aging else [f"{drafter}: one age only, so acceptance is taken not to fall with age"]
    notes += [] if training else [f"{drafter}: one number of updates only, so the gain from training is unknown"]
    if unidentified:
        fitted = {"chance": chance} | freshness.model_dump()
        values = ", ".join(f"{name} ({fitted[name]:.3g})" for name in unidentified)
        notes.append(
            f"{drafter}: the ages and updates in the data do not identify {values} by themselves: the level holds "
            f"within the recorded range, beyond it these are near an assumption"
        )
    if confounded:
        notes.append(f"{drafter}: age and updates vary together, so that the effect of each alone is uncertain")
    return freshness, tuple(notes)


def measured_state(
    freshness: Freshness, ages: pd.Series[float], updates: pd.Series[float], weights: pd.Series[float]
) -> MeasuredState:
    """One state with the mean level of several: what a model describes that was pooled over drafters in these states.

    >>> half = Freshness(untrained=0.5, floor=0.5, updates_to_train=2.0)
    >>> ones = pd.Series([1.0, 1.0])
    >>> measured_state(half, 0 * ones, pd.Series([0.0, 1e9]), ones).updates  # level 0.75
    1.3862943611198906
    """
    share = weights.to_numpy(np.float64) / max(float(weights.sum()), 1e-9)
    age, done = np.asarray(ages, np.float64), np.asarray(updates, np.float64)
    mean_age, to_gain = float(share @ age), 1.0 - freshness.untrained
    level = float(share @ freshness.levels(age, done))
    fresh = freshness.floor + (level - freshness.floor) * float(np.exp(min(mean_age / freshness.age_steps, 30.0)))
    if to_gain <= 0.0 or fresh >= 1.0:
        return MeasuredState(age=mean_age, updates=float(share @ done))
    gap = float(np.clip((1.0 - fresh) / to_gain, 1e-12, 1.0))
    return MeasuredState(age=mean_age, updates=abs(freshness.updates_to_train * float(np.log(gap))))


class _FreshnessLikelihood:
    """Chances per RL step and state of the drafter, and the least squares of their log-likelihood.

    Parameters are the log-odds of `chance`, of `untrained` and of `floor` / `untrained`, and the logarithms of the two
    spans. An RL step's factor is 1 + d with d ~ N(0, spread); for given parameters the best d is known in closed form.
    """

    def __init__(self, rows: pd.DataFrame, *, aging: bool, training: bool) -> None:
        by = ["rl_step", "age", "updates"]
        cells = rows.groupby(by, as_index=False)[["tried", "kept", "weight"]].sum()
        self.age, self.updates = cells["age"].to_numpy(np.float64), cells["updates"].to_numpy(np.float64)
        self.chance = (cells["kept"] / cells["tried"]).to_numpy(np.float64)
        self.step = pd.factorize(cells["rl_step"])[0]
        self.spread = _step_spread(rows.merge(cells[by].assign(chance=self.chance), on=by))
        noise = np.clip(self.chance, 0.02, 0.98)
        self.weight = cells["weight"].to_numpy(np.float64) / (noise * (1.0 - noise))
        most = float(np.clip(self.chance.max(), 1e-6, 1 - 1e-6))
        self.start = {"chance": float(np.log(most / (1.0 - most)))}
        if training:
            self.start |= {"untrained": 1.0, "updates_to_train": float(np.log1p(self.updates.max() / 4))}
        if aging:
            self.start |= {"floor": 1.0, "age_steps": float(np.log1p(self.age.max() / 2))}
        self.names = list(self.start)

    def solve(self, start: Mapping[str, float]) -> Any:
        """Solve from the usual start unless `start` is given, with the usual prior. Returns SciPy's solution."""
        from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

        initial = [start.get(name, value) for name, value in self.start.items()]
        return least_squares(self._residuals, initial, x_scale="jac", max_nfev=500)

    def model(self, p: Floats) -> tuple[float, Freshness]:
        """Chance of the fresh and trained drafter, and its level by age and training."""
        at = dict(zip(self.names, p.tolist(), strict=True))
        untrained = _share(at["untrained"]) if "untrained" in at else 1.0
        return _share(at["chance"]), Freshness(
            untrained=untrained,
            updates_to_train=_span(at["updates_to_train"]) if "updates_to_train" in at else 1.0,
            floor=untrained * _share(at["floor"]) if "floor" in at else untrained,
            age_steps=_span(at["age_steps"]) if "age_steps" in at else _FOREVER,
        )

    def unidentified(self, jacobian: Floats) -> tuple[tuple[str, ...], bool]:
        """Parameters that the data hardly constrain, and True if age and training are confounded."""
        covariance = np.linalg.pinv(jacobian.T @ jacobian)
        sd = np.sqrt(np.diag(covariance))
        unidentified = tuple(n for n, s in zip(self.names, sd.tolist(), strict=True) if s > _NARROWED * _PRIOR_SD)
        related = np.abs(covariance / np.outer(sd, sd))
        at = {name: i for i, name in enumerate(self.names)}
        pairs = [(a, b) for a in ("untrained", "updates_to_train") for b in ("floor", "age_steps")]
        return unidentified, any(a in at and b in at and related[at[a], at[b]] > _CONFOUNDED for a, b in pairs)

    def _predict(self, p: Floats) -> tuple[Floats, Floats]:
        """The chance of every cell with its RL step's factor, and what each factor adds to 1."""
        chance, freshness = self.model(p)
        plain = chance * freshness.levels(self.age, self.updates)
        num_steps = int(self.step.max()) + 1
        if num_steps == 1:
            return plain, np.zeros(1)
        pull = np.bincount(self.step, self.weight * plain * (self.chance - plain), num_steps)
        stiff = np.bincount(self.step, self.weight * plain**2, num_steps) + 1.0 / self.spread**2
        factor = pull / stiff
        return plain * (1.0 + factor[self.step]), factor

    def _residuals(self, p: Floats) -> Floats:
        predicted, factor = self._predict(p)
        prior = (p - np.array(list(self.start.values()))) / _PRIOR_SD
        return np.concatenate([np.sqrt(self.weight) * (predicted - self.chance), factor / self.spread, prior])


def _share(log_odds: float) -> float:
    return float(1.0 / (1.0 + np.exp(-np.clip(log_odds, -30, 30))))


def _span(logarithm: float) -> float:
    return float(np.exp(np.clip(logarithm, -7, 14)))


def drafter_states(acceptance: pd.DataFrame) -> pd.DataFrame:
    """acceptance.parquet with each row's `age` and `updates`; unknown updates of one drafter count as none."""
    updates = acceptance["drafter_updates"].astype(np.float64)
    is_known = updates.notna().groupby(acceptance["drafter"]).transform("all")
    return acceptance.assign(age=acceptance["drafter_age"], updates=updates.where(is_known, 0.0))


def _tries(rows: pd.DataFrame) -> pd.DataFrame:
    """Per response: drafted tokens that were tried, those of them that were kept, and how many tries they are worth."""
    tried, kept = [], []
    for most, lengths in zip(rows["max_depth"].tolist(), rows["accept_if_drafted"].tolist(), strict=True):
        accepted = np.asarray(lengths, np.int64)
        tried.append(int(np.minimum(accepted + 1, most).sum()))
        kept.append(int(accepted.sum()))
    # A text's position is tried by every draft that reaches it, so its tokens are all the evidence there is.
    weight = np.minimum(rows["accept_if_drafted"].map(len), tried)
    table = rows[["rl_step", "age", "updates"]].assign(tried=tried, kept=kept, weight=weight)
    return table[table["tried"] > 0]


def _step_spread(rows: pd.DataFrame) -> float:
    """Relative standard deviation of an RL step's mean that the spread of its responses leaves; `chance`: the mean."""
    variances = []
    for _, cell in rows.groupby(["rl_step", "age", "updates"]):
        if len(cell) > 1 and (mean := float(cell["chance"].iloc[0])) > 0:
            share = cell["tried"] / cell["tried"].sum()
            deviation = share * (cell["kept"] / cell["tried"] / mean - 1.0)
            variances.append(float((deviation**2).sum()) * len(cell) / (len(cell) - 1))
    return max(0.005, float(np.sqrt(np.median(variances)))) if variances else _STEP_SPREAD


@frozen
class TrainedLength:
    """A fitted trained length with the ends of its 95 % interval, and the chance of each drafted token within it."""

    trained_tokens: int
    low: int
    high: int
    chances: tuple[float, ...]


def fit_trained_length(drafts: pd.DataFrame, prompt_tokens: Mapping[tuple[object, ...], int]) -> TrainedLength | None:
    """The trained length that makes one drafter's drafts most likely; None where the drafts do not identify one.

    `prompt_tokens` are by response. Each token of a draft has a chance of its own, so depths may be mixed. Some
    responses are easier to draft for: deviances are divided by the dispersion of what these keep (quasi-likelihood).
    """
    cells = _Cells.of(drafts, prompt_tokens)
    longest, shortest = float(cells.context.max(initial=0.0)), float(cells.context.min(initial=np.inf))
    first = max(float(LEAST_TOKENS), shortest / USELESS_AT)
    if cells.num_responses < _MIN_RESPONSES or longest <= first:
        return None
    lengths = np.geomspace(first, longest, max(2, int(np.log(longest / first) / np.log(_RATIO))))
    each = np.array([cells.log_likelihood(length) for length in lengths])
    best = int(each.argmax())
    deviance = 2.0 * (each[best] - each) / cells.dispersion(lengths[best])
    gain = 2.0 * (each[best] - cells.log_likelihood(np.inf)) / cells.dispersion(lengths[best])
    if gain < _SURE or len(np.unique(cells.response[cells.context > lengths[best]])) < _MIN_RESPONSES:
        return None
    equal = np.flatnonzero(deviance < _SPAN)
    low, high = lengths[max(0, equal.min() - 1)], lengths[min(len(lengths) - 1, equal.max() + 1)]
    trained = round(float(lengths[best]))
    return TrainedLength(
        trained_tokens=trained,
        low=round(float(low)),
        high=round(float(high)),
        chances=tuple(cells.chances(trained)),
    )


def by_context(
    model: MeasuredAcceptance, drafts: pd.DataFrame, workload: pd.DataFrame
) -> tuple[MeasuredAcceptance | ContextAcceptance, list[str]]:
    """The model with the trained length of its drafter with a network, where drafts identify one, and a note of it.

    Then the drafter's chances within that length hold at every batch size: small batches are those of long contexts.
    A trained length is a property of one drafter: with several that have a network nothing is fitted.
    """
    names = [name for name in model.drafters if not model.copied(name)]
    if len(names) != 1 or drafts.empty:
        return model, []
    rows = drafts[drafts["drafter"] == names[0]]
    # The last draft of a response is cut where it ends.
    rows = rows[rows.duplicated(list(KEY), keep="last")]
    prompts = dict(zip(workload[list(KEY)].itertuples(index=False, name=None), workload["prompt_tokens"], strict=True))
    if rows.empty or (found := fit_trained_length(rows, prompts)) is None:
        return model, []
    deepest = max(depth for band in model.bands for depth in band.drafters_by_depth.get(names[0], {}))
    if len(found.chances) < deepest:
        return model, []
    note = (
        f"acceptance of {names[0]} falls with context like that of a drafter trained at {found.trained_tokens} tokens "
        f"(95 %: {found.low} to {found.high}): written as @{trained_text(found.trained_tokens)}, at every batch size"
    )
    bands = tuple(_replaced(band, names[0], found.chances) for band in model.bands)
    base = model.model_copy(update={"bands": bands})
    base = MeasuredAcceptance.model_validate(base.model_dump())
    return ContextAcceptance(base=base, trained_tokens=found.trained_tokens, names=(names[0],)), [note]


def _replaced(band: BatchBand, drafter: str, chances: tuple[float, ...]) -> BatchBand:
    """The band with a drafter's distributions made of its chances."""
    fits = {}
    for depth, fit in band.drafters_by_depth.get(drafter, {}).items():
        p = from_survival(np.cumprod(np.array(chances[:depth], np.float64), dtype=np.float64))
        fits[depth] = FittedDepth(accepted=tuple(p.tolist()), drafted=fit.drafted, num_samples=fit.num_samples)
    return band.model_copy(
        update={"drafters_by_depth": {**band.drafters_by_depth, **({drafter: fits} if fits else {})}}
    )


@frozen
class _Cells:
    """Counts of drafts of one response at about one context: tokens `tried` and `kept`, shape (cells, places)."""

    response: Ints
    context: Floats
    tried: Floats
    kept: Floats

    @classmethod
    def of(cls, drafts: pd.DataFrame, prompt_tokens: Mapping[tuple[object, ...], int]) -> _Cells:
        keys = list(drafts[list(KEY)].itertuples(index=False, name=None))
        response, _ = pd.factorize(pd.Series(keys, dtype=object))
        context = drafts["generated_tokens"].to_numpy(np.float64) + np.array([prompt_tokens[key] for key in keys])
        accepted, reach = drafts["accepted"].to_numpy(np.int64), drafts["reach"].to_numpy(np.int64)
        place = np.arange(1, int(reach.max()) + 1)
        tried = (place <= reach[:, None]) & (place <= accepted[:, None] + 1)
        kept = place <= accepted[:, None]
        pairs = np.stack([response, (context / _CELL_TOKENS).astype(np.int64)], axis=1)
        cells, at = np.unique(pairs, axis=0, return_inverse=True)
        at, n = at.ravel(), len(cells)
        sums = [np.array([np.bincount(at, column, n) for column in table.T]).T for table in (tried, kept)]
        mean = np.bincount(at, context, n) / np.bincount(at, minlength=n)
        return cls(response=cells[:, 0], context=mean, tried=sums[0], kept=sums[1])

    @property
    def num_responses(self) -> int:
        return len(np.unique(self.response))

    def chances(self, trained_tokens: float) -> list[float]:
        """The chance of each place of a draft within a trained length, given those before it."""
        return [float(value) for value in self._chances(self._share(trained_tokens))]

    def log_likelihood(self, trained_tokens: float) -> float:
        """Log-likelihood of all drafts."""
        chance = self._expected(trained_tokens)
        return float((self.kept * np.log(chance) + (self.tried - self.kept) * np.log1p(-chance)).sum())

    def dispersion(self, trained_tokens: float) -> float:
        """Variance of what responses keep over that of independent drafts, at least 1."""
        chance = self._expected(trained_tokens)
        off = np.bincount(self.response, (self.kept - self.tried * chance).sum(axis=1))
        return max(1.0, float((off**2).sum() / (self.tried * chance * (1.0 - chance)).sum()))

    def _expected(self, trained_tokens: float) -> Floats:
        share = self._share(trained_tokens)
        return np.clip(share[:, None] * self._chances(share), 1e-4, 1.0 - 1e-4)

    def _share(self, trained_tokens: float) -> Floats:
        return np.clip((USELESS_AT - self.context / trained_tokens) / (USELESS_AT - 1.0), 0.0, 1.0)

    def _chances(self, share: Floats) -> Floats:
        tried = (self.tried * share[:, None]).sum(axis=0)
        kept = self.kept.sum(axis=0)
        chance: Floats = np.minimum(1.0, np.divide(kept, tried, out=np.zeros_like(kept), where=tried > 0))
        return chance


@frozen
class AcceptanceFit:
    """A model, None where nothing was drafted; `notes` names the source of the data and what was left out."""

    kind: str
    model: Model | None
    notes: tuple[str, ...]


def fit_kind(trace: Trace, kind: str = "by-batch") -> AcceptanceFit:
    """Fit a model of `kind` to the trace's iterations, or to its acceptance.parquet.

    "by-batch" takes iterations, which alone know the batch, and acceptance.parquet where there are none; "siblings"
    needs iterations, "fresh" acceptance.parquet. Raises ConfigError for an unknown kind and where the trace lacks what
    a kind needs; "by-batch" without speculation has model None, and a trained length where drafts identify one.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of acceptance {kind!r}: there are {', '.join(KINDS)}")
    ways = {"by-batch": _by_batch, "siblings": _siblings, "fresh": _fresh}
    return ways[kind](trace)


def _by_batch(trace: Trace) -> AcceptanceFit:
    table = trace.iterations
    if table is None or not (table["draft_depth"] > 0).any():
        if trace.acceptance is None or trace.acceptance.empty:
            note = "nothing was speculated, so there is no acceptance to fit"
            return AcceptanceFit(kind="by-batch", model=None, notes=(note,))
        note = "acceptance: walked along acceptance.parquet, which knows no batch: one band for all of them"
        drafts = _walked_drafts(trace)
        pooled, context_notes = by_context(_pool(drafts, trace.drafters), drafts, trace.workload)
        return AcceptanceFit(kind="by-batch", model=pooled, notes=(note, *context_notes))
    measured, notes = fit_acceptance(table, trace.drafters)
    model: Model | None = measured
    if measured is not None and not all(map(measured.copied, measured.drafters)):
        drafts, left_out = recorded_drafts(trace)
        model, context_notes = by_context(measured, drafts, trace.workload)
        notes += context_notes
        notes += [f"acceptance by context is not known: {note}" for note in left_out if drafts.empty]
    return AcceptanceFit(kind="by-batch", model=model, notes=tuple(notes))


def _siblings(trace: Trace) -> AcceptanceFit:
    drafts, notes = recorded_drafts(trace)
    if drafts.empty:
        why = "".join(f"; {note}" for note in notes)
        raise ConfigError(f"{trace.path or 'the trace'} has no drafts to fit to{why}: record a run that speculates")
    names = sorted(drafts["drafter"].unique())
    candidates = [name for name in names if not trace.drafters[name].has_network] or names
    if len(candidates) > 1:
        raise ConfigError(f"acceptance by siblings describes one drafter, the trace has {', '.join(candidates)}")
    return AcceptanceFit(kind="siblings", model=fit_siblings(drafts, candidates[0]), notes=tuple(notes))


def _fresh(trace: Trace) -> AcceptanceFit:
    table = trace.acceptance
    place = trace.path or "the trace"
    if table is None or table.empty:
        raise ConfigError(
            f"{place} has no acceptance.parquet, so the ageing of acceptance is not identified: annotate the trace, "
            f"or {_ASSUMPTION}"
        )
    states = drafter_states(table)
    drafters = [
        str(name) for name, rows in states.groupby("drafter") if len(rows[["age", "updates"]].drop_duplicates()) > 1
    ]
    if not drafters:
        raise ConfigError(
            f"{place}: every drafter in acceptance.parquet has one age and one number of updates, so the ageing of "
            f"acceptance is not identified: annotate the trace with older drafters, or {_ASSUMPTION}"
        )
    if len(drafters) > 1:
        raise ConfigError(
            f"freshness is fitted to one drafter, acceptance.parquet has {', '.join(drafters)} at several ages"
        )
    annotated = states[states["drafter"] == drafters[0]].reset_index(drop=True)
    freshness, notes = fit_freshness(annotated, drafters[0])
    # The base is what the youngest drafter has accepted, one for all batches.
    youngest = annotated[annotated["age"] == annotated["age"].min()]
    length = youngest["accept_if_drafted"].map(len)
    model = FreshAcceptance(
        base=_pool(walked_drafts(youngest, int(annotated["max_depth"].min())), trace.drafters),
        drafter=drafters[0],
        freshness=freshness,
        measured=measured_state(freshness, youngest["age"], youngest["updates"], length),
        notes=notes,
    )
    return AcceptanceFit(kind="fresh", model=model, notes=notes)


def _walked_drafts(trace: Trace) -> pd.DataFrame:
    """The drafts of each drafter at the depth to which all of its rows go."""
    assert trace.acceptance is not None
    parts = [walked_drafts(rows, int(rows["max_depth"].min())) for _, rows in trace.acceptance.groupby("drafter")]
    if (drafts := pd.concat(parts, ignore_index=True)).empty:
        place = trace.path or "the trace"
        raise ConfigError(f"{place} has no drafts to fit to: its acceptance.parquet has no position")
    return drafts


def _pool(drafts: pd.DataFrame, drafters: Drafters) -> MeasuredAcceptance:
    """One distribution per drafter and reach, whatever the batch."""
    fits: dict[str, dict[int, FittedDepth]] = {}
    for _, rows in drafts.groupby(["drafter", "reach"]):
        drafter, depth = str(rows["drafter"].iloc[0]), int(rows["reach"].iloc[0])
        fitted = FittedDepth.counted(rows["accepted"].to_numpy(np.int64), depth)
        fits.setdefault(drafter, {})[depth] = fitted
    return MeasuredAcceptance(bands=(BatchBand(max_batch=None, drafters_by_depth=fits),), copies=drafters.copying(fits))


CELL_TOKENS = 16
"""Drafts that begin within so many tokens of each other are counted together."""
MIN_DRAFTS = 32


def fit_siblings(drafts: pd.DataFrame, drafter: str) -> SiblingAcceptance:
    """Fit the growth curve to recorded drafts, weighted least squares on counted chances.

    Raises ConfigError below MIN_DRAFTS drafts.
    """
    from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

    rows = drafts[drafts["drafter"] == drafter]
    if len(rows) < MIN_DRAFTS:
        raise ConfigError(
            f"drafter {drafter!r} has {len(rows)} drafts with a known number of finished siblings, "
            f"at least {MIN_DRAFTS} are needed"
        )
    table = pd.DataFrame(
        {
            "siblings": rows["num_siblings"].to_numpy(np.float64),
            "stretch": rows["generated_tokens"].to_numpy() // CELL_TOKENS,
            "position": rows["generated_tokens"].to_numpy(np.float64),
            "tried": np.minimum(rows["accepted"].to_numpy() + 1.0, rows["reach"].to_numpy()),
            "kept": rows["accepted"].to_numpy(np.float64),
        }
    )
    by = table.groupby(["siblings", "stretch"], as_index=False)
    cells = by.agg(position=("position", "mean"), tried=("tried", "sum"), kept=("kept", "sum"))
    siblings, position = np.asarray(cells["siblings"]), np.asarray(cells["position"])
    tried = np.asarray(cells["tried"])
    rate = np.asarray(cells["kept"]) / tried

    def model(p: Floats) -> SiblingAcceptance:
        low, gap = 1.0 / (1.0 + np.exp(-np.clip(p[:2], -30, 30)))
        return SiblingAcceptance(
            drafter=drafter,
            alone=float(low),
            most=float(low + gap * (1.0 - low)),
            exponent=float(np.exp(np.clip(p[2], -3, 2))),
            own_tokens=float(np.exp(np.clip(p[3], 0, 10))),
        )

    def residuals(p: Floats) -> Floats:
        # One draft's tokens are kept or lost together more often than apart; weights need only the right proportions.
        return np.asarray(np.sqrt(tried) * (model(p).alpha(siblings, position) - rate), np.float64)

    return model(least_squares(residuals, [-1.0, 0.0, -0.7, 4.0], x_scale="jac", max_nfev=2000).x)
