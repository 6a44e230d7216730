"""A run for the pages made of it."""

import json
from pathlib import Path

import pytest

from tltlab.files import write_json
from tltlab.traces.trace import read

TINY = Path(__file__).parents[3] / "traces" / "tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A RUN with all that a run writes beside its trace, names in it as hostile as can be."""
    run = tmp_path_factory.mktemp("runs") / "run"
    trace = read(TINY).select([0, 1])
    hostile = "<script src='http://evil.example/x.js'></script><img src=http://evil.example/y.png>"
    trace.replace(manifest=trace.manifest.model_copy(update={"name": "tiny & <b>bold</b>", "notes": hostile})).write(
        run / "trace"
    )
    steps = [{"rl_step": s, "policy": "a\"b'<i>", "measured_s": 1.0 + s, "predicted_s": 1.1 + s, "error": 0.1 / (1 + s)}
             for s in trace.rl_steps]  # fmt: skip
    write_json(run / "summary.json", {"verify": {"steps": steps, "median_error": 0.05, "worst_error": 0.1}})
    write_json(run / "run.json", {"argv": ["/opt/x/bin/tltlab", "train", "my recipe.toml"],
                                  "versions": {"vllm": "0.32.0"}, "recipe": {"seed": 3}})  # fmt: skip
    (run / "events.jsonl").write_text(json.dumps({"rl_step": 1, "event": f"worker 0 {hostile}"}) + '\n{"half')
    return run
