"""W&B and MLflow as loggers of a run. A resumed run goes on in the same run there, and an RL step that is done again is
not logged again: neither can take back what it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tltlab.files import read_json, write_json

RUN_IDS = "log_runs.json"
"""Which run of each service this run's folder is, and the newest RL step that W&B got."""

EVERY_STEP = "time/step_s"
"""A measure of every RL step, and of nothing that is measured between two: who got it got the step."""


class Wandb:
    """Rows over `rl_step`. A process killed offline loses what W&B got in its last five seconds or so."""

    setting = "wandb"

    def __init__(self, project: str, out: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        out.mkdir(parents=True, exist_ok=True)  # W&B would take a temporary folder
        self._out = out
        known = _kept(out).get("wandb", {})
        self._earlier: int = known.get("rl_step", -1)
        self._row = -1
        self._run = wandb.init(
            project=project,
            name=out.absolute().name,
            dir=str(out),
            id=known.get("id"),
            resume="allow",
            config=dict(settings),
            # Its summary would end the run's own lines; what it must ask at a terminal is still asked.
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("*", step_metric="rl_step")
        _keep(out, "wandb", {"id": self._run.id, "rl_step": self._earlier})

    def step(self, rl_step: int, metrics: Mapping[str, float]) -> None:
        if EVERY_STEP in metrics and rl_step <= self._earlier:
            return
        # W&B's own steps only rise and hold one row each: an RL step has its figures and what is measured before and
        # after it. Without `commit` a row waits for the next, and is lost with a process that is killed.
        self._row = max(3 * rl_step, self._row + 1)
        self._run.log({**metrics, "rl_step": rl_step}, step=self._row, commit=True)
        if EVERY_STEP in metrics:
            self._earlier = rl_step
            _keep(self._out, "wandb", {"id": self._run.id, "rl_step": rl_step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Mlflow:
    """Sends from a thread: a server that does not answer is tried again for minutes, not while the run waits."""

    setting = "mlflow"

    def __init__(self, project: str, out: Path, settings: Mapping[str, Any]) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        known = _kept(out).get("mlflow", {})
        if known:
            self._run_id = known["id"]
            self._client.update_run(self._run_id, status="RUNNING")
            history = self._client.get_metric_history(self._run_id, EVERY_STEP)
        else:
            experiment = mlflow.set_experiment(project)
            self._run_id = self._client.create_run(experiment.experiment_id, run_name=out.absolute().name).info.run_id
            _keep(out, "mlflow", {"id": self._run_id})
            mlflow.log_params(_flat(settings), run_id=self._run_id)
            history = []
        self._earlier: int = max((metric.step for metric in history), default=-1)
        self._log = mlflow.log_metrics
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._sent: deque[Future[None]] = deque()

    def step(self, rl_step: int, metrics: Mapping[str, float]) -> None:
        if EVERY_STEP in metrics:
            if rl_step <= self._earlier:
                return
            self._earlier = rl_step
        while self._sent and self._sent[0].done():
            self._arrived(self._sent.popleft())
        self._sent.append(self._thread.submit(self._log, dict(metrics), step=rl_step, run_id=self._run_id))

    def close(self, *, failed: bool) -> None:
        while self._sent:
            self._arrived(self._sent.popleft())
        self._thread.shutdown()
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _arrived(self, sent: Future[None]) -> None:
        try:
            sent.result()
        except BaseException:
            # Each of the others would be tried for minutes too.
            self._thread.shutdown(wait=False, cancel_futures=True)
            raise


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, as MLflow shows and compares them: it knows no nested ones."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value) if isinstance(value, Mapping) else {}
        found |= {f"{name}.{rest}": part for rest, part in inner.items()} or {name: value}
    return found


def _kept(out: Path) -> dict[str, Any]:
    path = out / RUN_IDS
    return dict(read_json(path)) if path.exists() else {}


def _keep(out: Path, service: str, run: Mapping[str, Any]) -> None:
    write_json(out / RUN_IDS, {**_kept(out), service: dict(run)})
