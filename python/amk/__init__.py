"""Searches for the fastest schedule of a decoder LLM's megakernel, and generates text with it.

Each function is a command of `amk` and returns its JSON document as a dict; `docs/reference/verdict.md` describes the
fields. A failure is an exception with the class of the exit code (`error.exit_code`). Nothing is printed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from . import _amk
from ._amk import (
    AmkError,
    BugError,
    CapabilityMissingError,
    InconclusiveError,
    IntegrityError,
    RefusedError,
    UsageError,
)

__all__ = [
    "AmkError",
    "BugError",
    "CapabilityMissingError",
    "InconclusiveError",
    "IntegrityError",
    "RefusedError",
    "UsageError",
    "evaluate",
    "generate",
    "loop",
    "propose",
]

# The command that starts amk again: a search on a GPU drives it in a process of its own.
_PROGRAM = [sys.executable, "-m", "amk"]
_amk.starts_as(_PROGRAM)

# NVRTC as pip installs it beside this package. The interpreter's own path leads out of a virtual environment.
_NVRTC = Path(__file__).resolve().parent.parent / "nvidia" / "cu13" / "lib"
if _NVRTC.is_dir():
    os.environ.setdefault("AMK_NVRTC", str(_NVRTC))

Path_ = Union[str, "os.PathLike[str]"]
# A schedule: any subset of the knobs, or the path of a JSON file with one.
Config = Union[Mapping[str, Any], Path_]


def _arguments(**given: Any) -> str:
    """The arguments that were given, as JSON."""
    return json.dumps({name: value for name, value in given.items() if value is not None}, default=os.fspath)


def _answer(text: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(text)
    return answer


def propose(
    model: str,
    *,
    target: Optional[str] = None,
    device: str = "auto",
    kv_capacity: Optional[int] = None,
    ledger: Optional[Path_] = None,
) -> dict[str, Any]:
    """The schedule to start from (`schedule_config`) and every knob with its legal values (`search_space`)."""
    given = _arguments(model=model, target=target, device=device, kv_capacity=kv_capacity, ledger=ledger)
    return _answer(_amk.propose(given))


def evaluate(
    model: str,
    config: Optional[Config] = None,
    *,
    schedule: Optional[str] = None,
    target: Optional[str] = None,
    device: str = "auto",
    kv_capacity: Optional[int] = None,
    seed: int = 0,
    shared_gpu: bool = False,
) -> dict[str, Any]:
    """The verdict on one schedule. An illegal, wrong or slow one is a verdict (`valid`, `correct`), no exception."""
    given = _arguments(
        model=model,
        config=dict(config) if isinstance(config, Mapping) else config,
        schedule=schedule,
        target=target,
        device=device,
        kv_capacity=kv_capacity,
        seed=seed,
        shared_gpu=shared_gpu,
    )
    return _answer(_amk.evaluate(given))


def loop(
    model: Optional[str] = None,
    *,
    budget: Union[int, str, None] = None,
    on_trial: Optional[Callable[[dict[str, Any]], Optional[bool]]] = None,
    out: Optional[Path_] = None,
    resume: bool = False,
    target: Optional[str] = None,
    device: str = "auto",
    devices: Optional[Sequence[int]] = None,
    kv_capacity: Optional[int] = None,
    schedule: Optional[str] = None,
    context: Optional[Sequence[int]] = None,
    seed: Optional[int] = None,
    strategy: Optional[str] = None,
    min_gain: Optional[float] = None,
    store: Optional[Path_] = None,
    shared_gpu: bool = False,
) -> dict[str, Any]:
    """Searches for a faster schedule until the budget (64 trials, or a time such as "10m") is spent.

    `on_trial` gets each row of the ledger once it is on the disk, in the calling thread; if it returns False the search
    ends. An exception in it, and Ctrl-C, end the search after the trial under way and are raised then, at the latest
    after 5 s. `loop(resume=True, out=...)` goes on.
    """
    given = _arguments(
        model=model,
        budget=None if budget is None else str(budget),
        out=out,
        resume=resume,
        target=target,
        device=device,
        devices=devices,
        kv_capacity=kv_capacity,
        schedule=schedule,
        context=context,
        seed=seed,
        strategy=strategy,
        min_gain=min_gain,
        store=store,
        shared_gpu=shared_gpu,
    )
    if on_trial is None:
        return _answer(_amk.search(given))
    callback = on_trial
    return _answer(_amk.search(given, lambda trial: callback(json.loads(trial))))


def generate(
    model: str,
    prompt: Union[str, Sequence[int], Sequence[Mapping[str, Any]]],
    *,
    max_new_tokens: int = 32,
    stop: Sequence[int] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    logprobs: Optional[int] = None,
    config: Optional[Config] = None,
    schedule: Optional[str] = None,
    target: Optional[str] = None,
    device: str = "auto",
    kv_capacity: Optional[int] = None,
) -> dict[str, Any]:
    """Continues a prompt: a text, token ids, or the messages of a chat. Greedy by default."""
    given = _arguments(
        model=model,
        prompt=prompt if isinstance(prompt, str) else list(prompt),
        max_new_tokens=max_new_tokens,
        stop=list(stop),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        logprobs=logprobs,
        config=dict(config) if isinstance(config, Mapping) else config,
        schedule=schedule,
        target=target,
        device=device,
        kv_capacity=kv_capacity,
    )
    return _answer(_amk.generate(given))
