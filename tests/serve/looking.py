"""Looks into running servers on a GPU, in parts: weights that arrive while requests wait (`wait_io`), evidence, a capture, answers that repeat, and
servers that tune themselves.

    looking.py AMK MODEL PART...

`streamed` wants a model of some GB that `amk export` wrote; `repeats` and `tune*` a small preset. Prints one line of JSON a part; exits with 1
if something is not as it should be. The standard library only: the machine with the GPU has no network.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

WAIT = 60
TOKENS = 800
REPEATS = 1000
# Tokens of a text of `tune_busy`.
TEXT = 128
PROMPT = [1, 17, 4242, 99]
# A step reads its weights once; keys, values and whole units of the ring are the rest.
MOST_OVER_WEIGHTS = 1.05


class Server:
    """`amk serve` on the GPU, ended with the block."""

    def __init__(self, amk, model, more, cores=None, env=None):
        command = [amk, "serve", "--model", model, "--device", "cuda", "--addr", "127.0.0.1:0", "--kv-capacity", "2048"]
        slow = (lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])) if cores else None
        self.amk = amk
        self.child = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=sys.stderr, text=True, preexec_fn=slow, env=env)
        self.begun = time.monotonic()
        self.document = json.loads(self.child.stdout.readline() or "{}")
        if "url" not in self.document:
            raise SystemExit(f"no server: {self.document}")
        self.ready_s = time.monotonic() - self.begun

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.send_signal(signal.SIGINT)
        try:
            self.code = self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.code = "killed"

    def ask(self, prompt, tokens, **more):
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        body["model"] = self.document["model"]
        request = urllib.request.Request(self.document["url"] + "/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=WAIT))

    def gaps(self, prompt, tokens):
        """A stream: its text and fingerprint, and the seconds between its events after the first."""
        body = {"model": self.document["model"], "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(self.document["url"] + "/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        times, text, fingerprint = [], "", None
        for line in urllib.request.urlopen(request, timeout=WAIT):
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["text"]
                fingerprint = chunk["system_fingerprint"]
        return text, fingerprint, [b - a for a, b in zip(times, times[1:])]

    def metrics(self):
        return urllib.request.urlopen(self.document["url"].removesuffix("/v1") + "/metrics", timeout=WAIT).read().decode()

    def metric(self, name):
        text = self.metrics()
        rows = [line.split() for line in text.splitlines() if line.split(" ")[0].split("{")[0] == name]
        return sum(float(row[1]) for row in rows)

    def state(self):
        """The state of the search that tunes it."""
        return self.metrics().split("amk_tune_schedule{", 1)[1].split('state="', 1)[1].split('"', 1)[0]

    def look(self, *command):
        """A command about this process: its exit code and document."""
        ran = subprocess.run([self.amk, *command, "--pid", str(self.child.pid), "--json"], capture_output=True, text=True, timeout=WAIT)
        return ran.returncode, json.loads(ran.stdout) if ran.stdout.strip() else {"stderr": ran.stderr[-300:]}


def streamed(amk, folder):
    """A request comes before the weights: its entry is in `wait_io`, in the ring and in the metrics, and its answer is that of a server that had them."""
    want, waited, answers = None, 0, []
    with Server(amk, folder, ["--prefill", "steps", "--batch", "1"]) as server:
        want = server.ask(PROMPT, 24)["choices"][0]
        _, before = server.look("inspect", "evidence")
    streams = ["--prefill", "steps", "--batch", "1", "--stream-weights", "--read-weights-by", "io-uring"]
    with Server(amk, folder, streams, cores=2) as server:
        asked = threading.Thread(target=lambda: answers.append(server.ask(PROMPT, 24)["choices"][0]))
        began = time.monotonic()
        asked.start()
        while asked.is_alive():
            _, ring = server.look("inspect", "ring")
            waited += ring["occupancy"]["wait_io"] > 0
        asked.join()
        took = time.monotonic() - began
        _, ring = server.look("inspect", "ring")
        code, evidence = server.look("inspect", "evidence")
        waits = server.metric("amk_io_waits_total")
    uploaded = [of["families"]["copy"]["figures"]["uploaded_bytes"] for of in (before, evidence)]
    good = ring["entered"]["wait_io"] >= 1 and waits >= 1 and answers == [want] and code == 0 and uploaded[0] == uploaded[1]
    return good, {
        "ready_s": round(server.ready_s, 2), "answer_s": round(took, 2), "looks_in_wait_io": waited, "entered": ring["entered"], "io_waits": waits,
        "same_answer": answers == [want], "evidence_exit": code, "derived": evidence["derived"], "missing": evidence["missing"], "uploaded_bytes": uploaded, "exit": server.code,
    }


def evidence(amk, folder):
    """1000 positions: the bytes that the loaders asked for, the ring's totals against what was asked, residency with and without NVML."""
    with Server(amk, folder, ["--prefill", "steps", "--batch", "1"]) as server:
        _, before = server.look("inspect", "evidence")
        server.ask([1], 1000)
        time.sleep(0.2)
        code, after = server.look("inspect", "evidence")
        positions = server.metric("amk_positions_total")
    copy = [of["families"]["copy"]["figures"] for of in (before, after)]
    a_step = (copy[1]["streamed_bytes"] - copy[0]["streamed_bytes"]) / 1000
    over = a_step / copy[1]["uploaded_bytes"]
    ring = after["families"]["ring"]["figures"]
    with tempfile.TemporaryDirectory() as empty:
        open(os.path.join(empty, "libnvidia-ml.so.1"), "w").close()
        env = {**os.environ, "LD_LIBRARY_PATH": empty + ":" + os.environ.get("LD_LIBRARY_PATH", "")}
        with Server(amk, folder, ["--prefill", "steps", "--batch", "1"], env=env) as hidden:
            hidden_code, without = hidden.look("inspect", "evidence")
    residency = without["families"]["residency"]
    good = code == 0 and after["complete"] and 0.9 < over < MOST_OVER_WEIGHTS and positions == 1000 and ring["entered"]["done"] == 1
    good = good and hidden_code == 5 and without["derived"] == ["residency"] and residency["figures"]["resident_bytes"] > 0
    return good, {
        "exit": code, "bytes_a_step": a_step, "over_weights": round(over, 4), "positions": positions, "ring": ring, "read_ns": after["read_ns"],
        "residency": after["families"]["residency"]["figures"], "without_nvml": [hidden_code, without["derived"], residency["figures"]],
    }


def capture(amk, folder):
    """Two captures at once beside four clients: equal, nothing dropped, all positions; one of at most 20 events; and the state of the GPU in `top`."""
    found = {}
    with Server(amk, folder, []) as server:
        server.ask(PROMPT, 8)
        before = server.metric("amk_positions_total")

        def traced(name, *more):
            found[name] = server.look("trace", *more)

        looks = [("one", "--seconds", "3"), ("two", "--seconds", "3"), ("few", "--seconds", "20", "--max-events", "20")]
        threads = [threading.Thread(target=traced, args=look) for look in looks]
        threads += [threading.Thread(target=server.ask, args=([1 + k, 2, 3], TOKENS)) for k in range(4)]
        for thread in threads:
            thread.start()
            time.sleep(0.3 if thread is threads[2] else 0)
        time.sleep(1)
        _, top = server.look("top", "--once")
        for thread in threads:
            thread.join()
        ran = server.metric("amk_positions_total") - before
        ring_code, _ = server.look("inspect", "ring")
    pick = ["stopped_by", "events", "dropped", "positions", "tokens"]
    shown = {name: {key: document.get(key) for key in pick} for name, (_, document) in found.items()}
    whole = [shown[name] for name in ("one", "two")]
    good = all(code == 0 for code, _ in found.values()) and ring_code == 0
    good = good and all(of["dropped"] == 0 and of["positions"] == ran and of["tokens"] == 4 * TOKENS for of in whole)
    good = good and shown["few"]["stopped_by"] == "events" and shown["few"]["events"] <= 20 and top.get("gpu") is not None
    return good, {"positions": ran, **shown, "ops": list(found["one"][1].get("ops", {})), "gpu": top.get("gpu")}


def repeats(amk, model):
    """1000 answers to one request are the same, with the log probabilities of each token and its rivals, in which every bit of a row of logits counts."""
    with Server(amk, model, ["--deterministic", "--batch", "1", "--prefill", "steps"]) as server:
        answers = {json.dumps(server.ask(PROMPT, 8, logprobs=5)["choices"][0]) for _ in range(REPEATS)}
    return len(answers) == 1 and server.code == 0, {"asked": REPEATS, "different": len(answers) - 1, "answer": min(answers)[:200]}


def tune(amk, model, more=(), goal=20):
    """A server with a kernel for eight sequences and a slow start tunes the kernel for one between bursts, reaches its goal, and answers every request."""
    with Server(amk, model, [*more, "--schedule", "neutral", "--tune", "--goal", f"{goal}%", "--out", tempfile.mkdtemp()]) as server:
        asked, answers = 0, {}

        def one(index):
            answer = server.ask([5 + index % 4, 6, 7], 48)
            answers.setdefault((index % 4, answer["system_fingerprint"]), set()).add(json.dumps(answer["choices"][0]))

        began, states = time.monotonic(), []
        while time.monotonic() - began < 40 and (not states or states[-1] in ("waiting", "tuning")):
            for width in (8, 1):
                burst = [threading.Thread(target=one, args=(asked + k,)) for k in range(width)]
                asked += width
                for thread in burst:
                    thread.start()
                for thread in burst:
                    thread.join()
            time.sleep(1.5)
            states.append(server.state())
        for index in range(4):
            one(asked + index)
        gain, kept = server.metric("amk_tune_gain"), server.metric("amk_tune_kept_total")
        counts = {name: server.metric(f"amk_tune_{name}") for name in ("trials_total", "refused_total", "rolled_back_total", "wait_seconds")}
    alike = all(len(of) == 1 for of in answers.values())
    good = states[-1] == "goal" and gain >= goal / 100 and kept >= 1 and server.code == 0
    fingerprints = sorted({fingerprint for _, fingerprint in answers})
    return good, {"state": states[-1], "seconds": round(time.monotonic() - began, 1), "asked": asked + 4, "gain": gain, "kept": kept, **counts, "one_answer_per_kernel": alike, "fingerprints": fingerprints}


def tune_batch(amk, model):
    """The same of a server whose one kernel is for eight sequences, whose schedule has less to gain."""
    return tune(amk, model, ["--batch", "8"], 5)


def prompt_of(index):
    return [5 + index % 4, 6, 7]


def crowd(server, ends):
    """16 clients that send the next request at once, until it ends: p99 of the gaps in their streams, and the different texts of each prompt by fingerprint."""
    gaps, texts, failed = [], {}, []

    def client(index):
        while not ends():
            try:
                text, fingerprint, between = server.gaps(prompt_of(index), TEXT)
            except Exception as error:  # any failed request is a finding
                failed.append(str(error))
                return
            gaps.extend(between)
            texts.setdefault((index % 4, fingerprint), set()).add(text)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gaps.sort()
    return 1e3 * gaps[len(gaps) * 99 // 100], texts, failed


def trials_of(search):
    with open(os.path.join(search, "ledger.jsonl")) as ledger:
        rows = [json.loads(line).get("record", {}) for line in ledger]
    return [row for row in rows if row.get("kind") == "trial"]


def repeated(amk, model, trials, texts):
    """Whether a server without a search gives each text again, with the schedule that its fingerprint names. Kernels for several sequences: `amk generate`
    has those for one."""
    for fingerprint in {of for _, of in texts}:
        rows = [row for row in trials if fingerprint.endswith("-b8-" + row["verdict"]["program_id"][:8])]
        if not rows:
            return f"{fingerprint} has no trial"
        with Server(amk, model, ["--batch", "8", "--no-prefix-cache", "--config", json.dumps(rows[0]["config"])]) as server:
            for (index, of), answers in texts.items():
                text, again, _ = server.gaps(prompt_of(index), TEXT) if of == fingerprint else ("", None, None)
                if of == fingerprint and ({text} != answers or again != of):
                    return f"prompt {index} of {fingerprint} is another text from {again}"
    return "all"


def tune_busy(amk, model):
    """16 clients leave no idle moment: the search has turns, keeps no planted lever, reaches its goal, p99 of the gaps in streams is at most 1.5 of a
    server without it, and each text is repeated by its fingerprint."""
    slow = ["--schedule", "neutral", "--batch", "8"]
    with Server(amk, model, slow) as server:
        until = time.monotonic() + 10
        before_ms, _, failed = crowd(server, lambda: time.monotonic() > until)
    search = os.path.join(tempfile.mkdtemp(), "search")
    with Server(amk, model, [*slow, "--tune", "--goal", "20%", "--tune-plant", "--out", search]) as server:
        began = time.monotonic()
        during_ms, texts, more = crowd(server, lambda: time.monotonic() - began > 300 or server.state() not in ("waiting", "tuning"))
        seconds = time.monotonic() - began
        _, top = server.look("top", "--once")
    tuning, failed, trials = top["tuning"], failed + more, trials_of(search)
    again = repeated(amk, model, trials, texts)
    good = tuning["stopped"] == "goal" and tuning["kept"] >= 1 and tuning["rolled_back"] >= 1 and tuning["gain_ci"]["low"] >= 0.2
    good = good and [row["outcome"] for row in trials[1:3]] == ["reverted", "disagreed"] and again == "all"
    good = good and during_ms <= 1.5 * before_ms and not failed and server.code == 0
    return good, {
        "seconds": round(seconds, 1), "tuning": tuning, "p99_gap_ms": [round(before_ms, 3), round(during_ms, 3)],
        "failed": len(failed), "errors": failed[:3], "texts": {f"{prompt} {by}": len(of) for (prompt, by), of in texts.items()}, "repeated": again,
        "trials": [[row["origin"], row["outcome"], row["gain"], round(row["began_s"], 1), round(row["ended_s"], 1), row["spent"]["total_s"]] for row in trials],
    }


PARTS = {part.__name__: part for part in (streamed, evidence, capture, repeats, tune, tune_batch, tune_busy)}


def main():
    amk, model, *parts = sys.argv[1:]
    failed = 0
    for part in parts:
        good, document = PARTS[part](amk, model)
        failed |= not good
        print(json.dumps({"part": part, "good": good, **document}), flush=True)
    return failed


sys.exit(main())
