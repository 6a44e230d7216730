"""The result of a rehearsal: a trace, and measured against simulated makespans."""

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import ChainAcceptance
from tltlab.acceptance.per_drafter import PerDrafter
from tltlab.charts import lines, save_figure
from tltlab.console import json_rows, made_by, table_text, verdict_text
from tltlab.costs.base import CostModel
from tltlab.costs.profiles import find_gpu, find_model, profile_costs
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError, RunError
from tltlab.files import write_json
from tltlab.records import Json, frozen
from tltlab.runtime.engine.environment import gpus, hardware, versions
from tltlab.runtime.engine.generation import GenerationRequest
from tltlab.runtime.rollout.played import STOCK, RehearsalPlan, played, rollout_of
from tltlab.runtime.rollout.session import SessionRecorder
from tltlab.sim.scenario import Scenario
from tltlab.sim.study.study import Cell
from tltlab.sim.verification.played import Agreement, judge
from tltlab.stats import Interval, finite, interval_json, paired_ratio
from tltlab.strategy import drafters_of
from tltlab.traces.metrics import mean_accept_length, running_requests, tail_window
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace, read


@frozen
class Rehearsal:
    """A row per policy in `rows`, in the order of the plan: those of `agreement`, and what engines showed.

    Columns beside: `tail_s`, the part with few requests left (`tail_fraction`); `tokens_per_s`; `accept_length`;
    `shipped_s` and `shipped_error`, predicted from shipped costs; `why_not` is the reason for a missing prediction.

    `speedup` is that of `best`, the fastest policy of tltlab, over stock vLLM, or plain decoding where stock was not
    played; `simulated` the ratio of their predictions.
    """

    rows: pd.DataFrame
    agreement: Agreement
    about: str
    best: str
    over: str
    speedup: Interval | None
    simulated: float | None

    @property
    def sentence(self) -> str:
        if self.speedup is None:
            return f"{self.best} alone was played: there is nothing to compare."
        over = "stock vLLM" if self.over == STOCK else self.over
        simulated = "not predicted" if self.simulated is None else f"simulated {self.simulated:.2f}x"
        ends = "" if math.isnan(self.speedup.low) else f" [{self.speedup.low:.2f}, {self.speedup.high:.2f}]"
        return f"{self.best} {self.speedup.estimate:.2f}x{ends} over {over}; {simulated}."

    @property
    def verdict(self) -> str:
        """The measured speed-up, why, and what to do next."""
        row = self.rows.set_index("policy").loc[self.best]
        kept: str = "no drafts" if pd.isna(row["accept_length"]) else f"{row['accept_length']:.2f} tokens per draft"
        is_sure = self.speedup is not None and self.speedup.low > 1
        then = f"TLTLAB_POLICY={self.best} python train.py" if is_sure else "more --rounds make the range narrower"
        return f"{self.sentence}\nWhy: {self.best} has {kept}. {self.agreement.number}\nNext: {then}"

    def json(self) -> dict[str, Any]:
        """The keys of `tltlab rehearse --json`."""
        return {
            "policies": json_rows(self.rows),
            **{name: getattr(self, name) for name in ("about", "best", "over", "verdict")},
            "num_rounds": int(self.agreement.rollouts["policy"].value_counts().min()),
            "median_error": finite(self.agreement.median_error),
            "speedup": interval_json(self.speedup),
            "simulated_speedup": self.simulated,
            **made_by(),
        }

    def text(self, lists: Mapping[str, Sequence[str]] = {}) -> str:
        """The same for people."""
        columns = (
            "policy: {policy}; measured s: {measured_s:.3g}; tail s: {tail_s:.3g}; tokens/s: {tokens_per_s:.0f}; "
            "accept: {accept_length:.2f}; predicted s: {predicted_s:.3g}; error: {error:+.1%}; "
            "shipped: {shipped_error:+.1%}"
        )
        why = [f"{name}: {why}" for name, why in zip(self.rows["policy"], self.rows["why_not"], strict=True) if why]
        lists = {"played": [self.about], "assumed": ["lengths and acceptance are forced", *why], **lists}
        return f"{verdict_text(self.verdict, lists)}\n\n{table_text(self.rows, columns, left=1)}"


def judged(plan: RehearsalPlan, out: Path) -> Rehearsal:
    """Compare what was played with predictions; write the trace, `policies.json`, `summary.json` and `picture.png`.

    A round in which a worker is missing is left out. RunError where nothing is whole.
    """
    _record(plan, out)
    granted = {
        name: PerDrafter(
            dict.fromkeys(drafters_of(policy.strategies), ChainAcceptance(kept=plan.rates[name])), None, plan.granted
        )
        for name, policy in plan.policies.items()
        if plan.rates[name]
    }
    found = judge(out, known=granted, unlike=(STOCK,), seed=plan.seed, allow_code=plan.modules)
    trace, costs, rollouts = read(out), _shipped_costs(plan), found.rollouts
    names = [name for name in plan.policies if name in set(rollouts["policy"])]
    rows = found.rows.set_index("policy").loc[names]
    shown: dict[str, Json] = {}
    for name in names:
        steps = rollouts.loc[rollouts["policy"] == name, "rl_step"].tolist()
        why = f"not predicted: {found.why_not[name]}" if name in found.why_not else ""
        shown[name] = _shown(trace.select(steps)) | {"why_not": why, "shipped_s": math.nan}
        shown[name]["tokens_per_s"] = sum(map(sum, plan.lengths)) / rows["measured_s"][name]
        if costs is not None:
            scenario = Scenario.of(
                trace.select(steps[:1]), costs=costs, acceptance=granted.get(name), placement="recorded"
            )
            cell = Cell(name=name, policy=plan.policies[name], scenario=scenario)
            shown[name]["shipped_s"] = cell.makespans()[0]["makespan_s"]
    rows = rows.join(pd.DataFrame.from_dict(shown, orient="index"))
    rows["shipped_error"] = rows["shipped_s"] / rows["measured_s"] - 1
    best = str(rows["measured_s"].drop(STOCK, errors="ignore").idxmin() if names != [STOCK] else STOCK)
    over = next((name for name in (STOCK, "none") if name in names and name != best), best)
    speedup = simulated = None
    if over != best:
        seconds = rollouts.pivot(index="round", columns="policy", values="measured_s")[[over, best]].dropna()
        speedup = paired_ratio(seconds[over].tolist(), seconds[best].tolist())
        simulated = finite(float(rows["predicted_s"][over] / rows["predicted_s"][best]))
    result = Rehearsal(
        rows=rows.reset_index(names="policy"), agreement=found, about=plan.about, best=best, over=over,
        speedup=speedup, simulated=simulated,
    )  # fmt: skip
    write_json(out / "summary.json", result.json())
    first = rollouts.groupby("policy")["rl_step"].first()
    curves = {name: running_requests(trace, int(first[name])) for name in names}
    title = f"Requests of the first round, {plan.model} on {hardware()}"
    stepped = {name: (np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]) for name, (x, y) in curves.items()}
    save_figure(lines(stepped, xlabel="seconds", ylabel="running requests", title=title), out / "picture.png")
    return result


def _shown(part: Trace) -> Json:
    """Return what a policy's rollouts show beside their times."""
    windows = [window for step in part.rl_steps if (window := tail_window(part, step))]
    tail_s = float(np.mean([end - start for start, end in windows])) if windows else math.nan
    return {"accept_length": mean_accept_length(part), "tail_s": tail_s}


def _record(plan: RehearsalPlan, out: Path) -> None:
    """Write what was played as a session."""
    done = Counter(row["rl_step"] for row in played(out) if row["row"] == "rollout")
    whole = [visit for visit in plan.visits if done[visit.rl_step] == len(plan.lengths)]
    if not whole:
        raise RunError(f"no rollout was played to its end within the time; the engines' logs are in {out}")
    longest = max(map(max, plan.lengths))
    manifest = Manifest(
        kind="recorded", name=out.name, created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=f"{plan.model}, shape without weights", hardware=hardware(), engine=f"vllm {versions()['vllm']}",
        num_workers=len(plan.lengths), max_response_tokens=longest, group_size=plan.group_size,
        license="Apache-2.0", source="tltlab", seed=plan.seed,
        notes=f"tltlab rehearse: {plan.about}; lengths forced, drafts kept at {plan.granted}, token ids left out",
        drafters=Drafters(plan.specs).own,
    )  # fmt: skip
    # Made anew of what was played, which stays.
    shutil.rmtree(out / "trace", ignore_errors=True)
    with SessionRecorder(out, manifest, plan.policies, plan.seed) as recorder:
        for visit in whole:
            parts = [rollout_of(out, visit, worker) for worker in range(len(plan.lengths))]
            prompt = [0] * plan.prompt_tokens
            like = GenerationRequest(key=(0, "", 0, 0), prompt_token_ids=prompt, max_response_tokens=longest)
            shares = [[replace(like, key=response.key) for response in part.responses] for part in parts]
            recorder.add(visit, shares, parts, tokens=False)


def _shipped_costs(plan: RehearsalPlan) -> CostModel | None:
    """Costs that come along for this GPU and model; None on a CPU, and for a GPU or model that is not known."""
    if not plan.gpus:
        return None
    for word in gpus()[0][0].split():
        with suppress(ConfigError):
            gpu, model = find_gpu(word), find_model(plan.model)
            return profile_costs(None, gpu, model)
    return None
