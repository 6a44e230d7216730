"""Names under which programs keep what a trace needs, and the search for them among a record's fields.

A name is compared by its letters and digits in lower case: `response_tokens` is also "Response tokens" and
`responseTokens`. A field within objects has its path, `usage.completion_tokens`, and is found by its last part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache

_RESPONSE = (
    "response", "output", "completion", "generated", "generation", "gen", "decode", "resp", "out", "answer", "sampled",
    "rollout", "candidates", "eval", "predicted",
)  # fmt: skip
_PROMPT = ("prompt", "input", "question", "query", "prefill", "request", "prompteval", "instruction")
_TOKENS = ("tokens", "toks", "token")
_SIZES = (
    "len", "lens", "length", "lengths", "tokenlen", "tokenlens", "tokenlength", "tokenlengths", "tokencount",
    "tokencounts", "tokenscount", "tokensize", "numtokens", "ntokens",
)  # fmt: skip


def _of(words: Sequence[str], units: Sequence[str]) -> tuple[str, ...]:
    return tuple(word + unit for word in words for unit in units)


def _counted(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(prefix + name for prefix in ("num", "n", "number") for name in _of(words, _TOKENS))


NAMES: dict[str, tuple[str, ...]] = {
    # Numbers of tokens; a list of them is one of lengths.
    "response_sizes": (
        *_of(_RESPONSE, _SIZES), *_counted(("response", "output", "completion", "generated", "gen", "generation")),
        "generatedtokencount", "candidatestokencount", "tokenspredicted", "lenresponse", "predictedn", "evalcount",
        "outputsequencelength",
        "usageoutput",
    ),
    "prompt_sizes": (
        *_of(_PROMPT, _SIZES), *_counted(_PROMPT[:2]), "tokensevaluated", "promptn", "promptevalcount", "usageinput",
        "inputsequencelength",
    ),
    # Numbers of tokens, or the tokens.
    "response_tokens": (*_of(_RESPONSE, _TOKENS), "tokensgenerated"),
    "prompt_tokens": (*_of(_PROMPT, _TOKENS), "contexttokens"),
    "sizes": ("length", "lengths", "len", "lens", "numtokens", "ntokens", "tokencount", "tokencounts", "tokenlength"),
    "tokens": ("tokens", "toks"),
    # Prompt and response together.
    "total": ("totaltokens", "seqlen", "seqlens", "sequencelength", "totallen", "totallength", "totaltokencount"),
    # Lists with an entry for each token.
    "response_ids": (
        *_of(("response", "output", "completion", "generated", "generation", "gen", "resp", "sampled", "action"),
             ("ids", "tokenids", "idslist")), "actions", "completionsids", "responsesids", "outputstokenids",
        "choicestokenids", "samplestokenids",
    ),
    "prompt_ids": _of(("prompt", "query", "question"), ("ids", "tokenids", "inputids", "idslist")),
    "all_ids": ("tokenids", "inputids", "sequence", "sequences", "sequenceids", "allids", "ids", "inputtokenids"),
    "mask": (
        *_of(("loss", "response", "action", "completion", "assistant", "answer", "generation", "tokenloss"),
             ("mask", "masks", "tokenmask", "tokensmask")), "assistantmasks",
    ),
    "logprobs": _of(
        ("", "response", "rollout", "output", "completion", "token", "old", "sampling", "sampled", "policy"),
        ("logprobs", "logprob", "logps", "pertokenlogps", "outputlogprobs"),
    ),
    # Texts and conversations.
    "response_text": (
        "output", "completion", "response", "generatedtext", "generatedtexts", "responsetext", "completiontext",
        "outputtext", "outputs", "completions", "responses", "resps", "generations", "generation", "modeloutput",
        "modelresponse", "samples", "choices", "rollouts", "candidates", "outputresponse",
        "choicestext", "choicesmessage", "outputstext", "samplestext", "candidatescontent",
    ),
    "prompt_text": (
        "input", "prompt", "prompttext", "inputtext", "inputprompt", "prompts", "inputs", "question", "query",
        "problem", "instruction", "genargs0arg0",
    ),
    "conversation": (
        "messages", "conversations", "conversation", "traj", "trajectory", "chathistory", "dialog", "dialogue",
        "messagelog", "history",
    ),
    # Prompt and sample; the names of the second kind may also number the rows.
    "prompt_id": (
        "promptid", "group", "groupid", "groupindex", "groupidx", "uid", "problemid", "problemidx", "questionid",
        "questionidx", "taskid", "taskindex", "taskidx", "ngtaskindex", "promptindex", "promptidx", "promptuid",
        "promptuuid", "exampleid", "exampleidx", "itemid", "queryid", "qid", "docid", "instanceid", "extrainfoindex",
        "datasetindex",
    ),
    "row_id": ("requestid", "customid", "rid", "uuid", "index", "idx", "id", "dataid", "sampleuid"),
    "sample": (
        "sample", "sampleid", "sampleindex", "sampleidx", "rolloutindex", "rolloutidx", "completionindex",
        "completionidx", "responseindex", "responseidx", "trial", "repeat", "ngrolloutindex",
    ),
    "rl_step": (
        "rlstep", "step", "globalstep", "trainingstep", "trainstep", "iteration", "globalsteps", "trainglobalstep",
        "trainingglobalstep", "trainerglobalstep", "rolloutstep", "stepnum", "stepidx", "rolloutid",
    ),
    "epoch": ("epoch",),
    # Outcome.
    "turns": ("numturns", "nturns", "turns"),
    "reward": ("reward", "score", "rewards", "scores", "totalreward", "rewardscore", "finalreward"),
    "finish_reason": ("finishreason", "finishreasons", "finishedreason", "stopreason", "stopreasons", "donereason"),
    "status": ("status",),
    "is_cut": ("truncated", "istruncated", "clipped", "isclipped"),
    "error": ("error", "errors", "errormessage", "errormsg", "errorcode", "exception"),
    "success": ("success", "succeeded", "ok"),
    "status_code": ("statuscode", "httpstatus"),
    "cap": (
        "maxresponsetokens", "maxtokens", "maxcompletiontokens", "maxnewtokens", "maxoutputtokens", "maxresponselength",
        "maxcompletionlength",
    ),
    "worker": ("worker", "workerid", "dprank", "dataparallelrank", "engineindex", "replica"),
    # Times, also with the units of UNITS at their end.
    "t_submit": (
        "tsubmit", "starttime", "starttimes", "start", "arrivaltime", "arrival", "arrivedat", "submittime", "timestamp",
        "queued", "requesttime", "createdat",
    ),
    "t_first_token": ("tfirsttoken", "firsttokentime", "firsttoken"),
    "ttft": ("ttft", "ttfts", "timetofirsttoken"),
    "t_finish": ("tfinish", "finishtime", "finishedtime", "endtime", "end", "lasttoken", "finishedat"),
    "latency": (
        "latency", "latencies", "e2elatency", "e2el", "e2e", "requestlatency", "duration", "elapsed", "elapsedtime",
    ),
}  # fmt: skip
UNITS = {
    "": None, "ts": 1.0, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "millis": 1e-3, "us": 1e-6,
    "ns": 1e-9,
}  # fmt: skip
"""Seconds of a unit that ends the name of a time; None is unknown."""
TIMES = ("t_submit", "t_first_token", "ttft", "t_finish", "latency")

_ANYWHERE = {
    "tokens", "sizes", "all_ids", "response_text", "prompt_text", "conversation", "row_id", "sample", "rl_step",
    "epoch", "reward", "status", "is_cut", "error", "success", "worker", *TIMES,
}  # fmt: skip
"""Kinds with names so common that a field within an object counts only where _ENVELOPES are around it."""
_ENVELOPES = {
    "response", "body", "usage", "metainfo", "choices", "outputs", "output", "message", "result", "data", "record",
    "completion", "responsescreateparams", "request", "metrics", "timings", "details", "sample", "rollout",
    "trajectory", "usagemetadata", "arguments", "genargs0", "responses", "choice", "error",
    "reward", "samples", "rollouts", "candidates", "generations", "completions",
}  # fmt: skip
LISTS = {"response_ids", "prompt_ids", "all_ids", "mask", "logprobs", "response_tokens", "prompt_tokens", "tokens",
         "response_sizes", "prompt_sizes", "sizes"}  # fmt: skip
"""Kinds whose cells may be lists of numbers."""


@lru_cache(1 << 12)
def plain(name: object) -> str:
    """Return a name by its letters and digits, parts of a path by their points.

    >>> plain("Response Tokens"), plain("usage.completionTokens")
    ('responsetokens', 'usage.completiontokens')
    """
    return re.sub(r"[^a-z0-9.]", "", str(name).lower())


def matches(columns: Iterable[str], kind: str, fits: Callable[[str], bool] = lambda column: True) -> list[str]:
    """Return the columns with a name of a kind that fit: least deep in objects first, then in the order of names."""
    order = {name: at for at, name in enumerate(NAMES[kind])}
    found = []
    for column in columns:
        *around, last = plain(column).split(".")
        depth = len(around)
        name = next((n for n in ("".join(around[-1:]) + last, last) if n in order), None)
        if name is None and kind in TIMES:
            name = next(
                (last.removesuffix(u) for u in UNITS if u and last.endswith(u) and last.removesuffix(u) in order), None
            )
        if kind == "row_id" and around and last in ("index", "idx"):
            continue  # Of a choice among several.
        if name is None or (kind in _ANYWHERE and not _ENVELOPES.issuperset(around)) or not fits(column):
            continue
        found.append((depth, order[name], column))
    return [column for _, _, column in sorted(found, key=lambda item: item[:2])]


@cache
def kind_of(column: str) -> frozenset[str]:
    """Return the kinds that a column's name is one of."""
    return frozenset(kind for kind in NAMES if matches([column], kind))


def unit_of(column: str) -> float | None:
    """Return the seconds of the unit at the end of a time's name; None where it has none."""
    last = plain(column).rpartition(".")[2]
    names = {name for kind in TIMES for name in NAMES[kind]}
    if last in names:
        return None
    return next((UNITS[u] for u in UNITS if u and last.endswith(u) and last.removesuffix(u) in names), None)
