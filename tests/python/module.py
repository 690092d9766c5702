"""The Python module, on a machine without a GPU. `python module.py [AMK]`: AMK is a built library (target/debug/lib_amk.so),
which is put beside the sources in a folder of its own; without it the installed wheel is tried."""

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(tempfile.mkdtemp(prefix="amk-python-"))
library = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
os.chdir(HERE)
os.environ["AMK_DATA"] = str(HERE / "data")
if library:
    package = HERE / "path" / "amk"
    shutil.copytree(ROOT / "python" / "amk", package)
    os.symlink(library, package / "_amk.abi3.so")
    sys.path.insert(0, str(package.parent))
    os.environ["PYTHONPATH"] = str(package.parent)

import amk  # noqa: E402
from amk import _amk  # noqa: E402


def raised(kind, code, say, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        assert type(error) is kind and error.exit_code == code, (error, error.exit_code)
        assert say in str(error), error
        return
    raise AssertionError(f"{call.__name__} gave an answer")


def propose_and_evaluate():
    proposal = amk.propose("toy", device="cpu")
    assert proposal["schema"] == "amk.propose.v1", proposal["schema"]
    config = proposal["schedule_config"]
    verdict = amk.evaluate("toy", config, device="cpu")
    assert verdict["correct"] and verdict["latency_kind"] == "predicted", verdict
    assert verdict["schedule_id"] == proposal["schedule_id"]
    illegal = amk.evaluate("toy", {"pipeline": {"stages": 1_000_000}}, device="cpu")
    assert not illegal["valid"] and illegal["violations"], illegal
    file = HERE / "config.json"
    file.write_text(json.dumps(config))
    assert amk.evaluate("toy", file, device="cpu")["program_id"] == verdict["program_id"]


def loop():
    rows = []
    answer = amk.loop("toy", budget=6, device="cpu", out=HERE / "a", on_trial=rows.append)
    assert answer["schema"] == "amk.loop.v1" and answer["n_trials"] == 6, answer
    assert [row["trial"] for row in rows] == list(range(6)), rows
    # The callback gets the rows of the ledger.
    ledger = Path(answer["ledger"]).read_text()
    assert all(row["verdict"]["schedule_id"] in ledger for row in rows), rows
    # `False` ends the search, `None` does not; the threads of both are the caller's.
    threads = []
    def two(row):
        threads.append(threading.current_thread())
        return False if row["trial"] == 1 else None
    stopped = amk.loop("toy", budget=50, device="cpu", out=HERE / "b", on_trial=two)
    assert (stopped["n_trials"], stopped["stopped_by"]) == (2, "interrupted"), stopped
    assert set(threads) == {threading.main_thread()}
    resumed = amk.loop(resume=True, out=HERE / "b", budget=4)
    assert (resumed["n_trials"], resumed["stopped_by"]) == (4, "trials"), resumed


def errors():
    raised(amk.UsageError, 2, "no-such-model", amk.loop, "no-such-model", out=HERE / "c")
    raised(amk.UsageError, 2, "budget", amk.loop, "toy", budget="soon", out=HERE / "c")
    raised(amk.CapabilityMissingError, 3, "", amk.evaluate, "toy", device="cuda")
    raised(amk.UsageError, 2, "out of range", amk.generate, "toy", [10**6], device="cpu")
    raised(amk.UsageError, 2, "top_p", amk.generate, "toy", [1], top_p=7.0, device="cpu")
    ledger = HERE / "a" / "ledger.jsonl"
    text = ledger.read_text()
    ledger.write_text(text.replace('"seed":0', '"seed":1', 1))
    raised(amk.IntegrityError, 4, "ledger.jsonl", amk.propose, "toy", device="cpu", ledger=ledger)
    ledger.write_text(text)

    def fails(row):
        raise LookupError(row["trial"])
    try:
        amk.loop("toy", budget=50, device="cpu", out=HERE / "d", on_trial=fails)
    except LookupError as error:
        assert error.args == (0,)
    else:
        raise AssertionError("the callback's exception was lost")
    assert issubclass(amk.UsageError, amk.AmkError) and amk.BugError.exit_code == 70
    try:
        amk.loop("toy", budgets=4)
    except TypeError:
        pass
    else:
        raise AssertionError("an unknown argument was taken")


def interrupts():
    """Ctrl-C in the middle of a long search, and before its first trial."""
    for after, model, folder in ((0.5, "toy", "e"), (0.05, "smollm2-135m", "f")):
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
        began = time.monotonic()
        timer.start()
        try:
            amk.loop(model, budget=100_000, device="cpu", out=HERE / folder)
        except KeyboardInterrupt:
            took = time.monotonic() - began - after
            assert took < 7, took
            print(f"KeyboardInterrupt {took:.2f} s after the signal at {after} s")
        else:
            raise AssertionError("the search went on")
    # What is acknowledged is on the disk, and the search goes on from there.
    trials = len((HERE / "e" / "results.tsv").read_text().splitlines()) - 1
    assert trials > 0
    resumed = amk.loop(resume=True, out=HERE / "e", budget=trials + 1)
    assert resumed["n_trials"] == trials + 1, resumed


def generate():
    answer = amk.generate("toy", [1, 2, 3], max_new_tokens=4, device="cpu", logprobs=2)
    graph = amk.generate("toy", [1, 2, 3], max_new_tokens=4, device="eval")
    assert answer["tokens"] == graph["tokens"] and len(answer["tokens"]) == 4, answer
    assert len(answer["logprobs"]) == 4 and "logprobs" not in graph
    sampled = [amk.generate("toy", [1], temperature=2.0, seed=seed, device="eval")["tokens"] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2], sampled


def command_line():
    """The console script answers as the binary does, and Ctrl-C ends it."""
    run = [sys.executable, "-m", "amk"]
    done = subprocess.run([*run, "explain", "5"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["schema"].startswith("amk."), done
    done = subprocess.run([*run, "propose", "--model", "no-such"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and json.loads(done.stdout)["exit_code"] == 2, done
    child = subprocess.Popen([*run, "loop", "--model", "smollm2-135m", "--device", "cpu", "--budget", "100000",
                              "--out", str(HERE / "g")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(2)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130, child.returncode


def stubs():
    """The stub names what the extension has, no more and no less."""
    stub = (Path(amk.__file__).parent / "_amk.pyi").read_text()
    named = {line.split()[1].split("(")[0].rstrip(":") for line in stub.splitlines() if line.startswith(("def ", "class "))}
    assert named == {name for name in dir(_amk) if not name.startswith("__")}, named
    for name in ("propose", "evaluate", "loop", "generate"):
        signature = inspect.signature(getattr(amk, name))
        assert signature.return_annotation != inspect.Signature.empty
        assert all(p.annotation != inspect.Parameter.empty for p in signature.parameters.values()), name


try:
    for test in (propose_and_evaluate, loop, errors, interrupts, generate, command_line, stubs):
        began = time.monotonic()
        test()
        print(f"{test.__name__}: {time.monotonic() - began:.1f} s")
finally:
    os.chdir(ROOT)
    shutil.rmtree(HERE, ignore_errors=True)
