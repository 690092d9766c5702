"""Checks of `.ci/device` on the documents and logits that `amk` wrote: each prints a line of figures; exit code 1 if something is wrong.

    .ci/device_checks.py correct NAME VERDICT     the verdict says that the schedule is correct
    .ci/device_checks.py tokens MODEL             prints the prompt of a golden model
    .ci/device_checks.py golden MODEL OUT DEVICE  OUT/logits.safetensors and OUT/generate.json against the golden ones
    .ci/device_checks.py parted OUT PROMPT        the megakernel against the evaluated graph, up to the first different token
    .ci/device_checks.py same ANSWER < OTHER      two answers of `amk generate` have the same tokens
    .ci/device_checks.py gpus TRACE EVENTS GPUS   a trace has the workers of all GPUs on one clock, and what they hand each other
    .ci/device_checks.py ring LOG                 each command that a log has from the ring has its answer there, under the same number
"""

import json
import sys


def read(path):
    with open(path) as file:
        return json.load(file)


def logits(path):
    from safetensors.numpy import load_file

    return load_file(path)


def correct(name, path):
    verdict = read(path)
    print(f"  {name} {verdict['latency_us']} us")
    return verdict["correct"]


def gpus(trace, path, count):
    step, events = read(trace)["schedules"][0]["step"], read(path)["traceEvents"]
    each = step["workers"] // int(count)
    tids = {phase: {e["id"]: e["tid"] // each for e in events if e["ph"] == phase} for phase in "sf"}
    between = sum(gpu != tids["f"][arrow] for arrow, gpu in tids["s"].items())
    named = {e["args"]["name"].rsplit(" worker", 1)[0] for e in events if e.get("name") == "thread_name"}
    print(
        f"  {count} GPUs: span {step['span_ns'] / 1000:.1f} us, clocks ahead by {step['gpu_clocks_ahead_ns']} ns, "
        f"within {step['gpu_clocks_within_ns']} ns; {between} of {len(tids['s'])} arrows between GPUs"
    )
    return len(named) == int(count) and between > 0 and step["gpu_clocks_within_ns"] < 20000


def ring(path):
    with open(path) as log:
        entries = [json.loads(line) for line in log]
    sent, answered = ([entry["sequence"] for entry in entries if entry.get("op") == op] for op in ("submission", "completion"))
    print(f"  {len(sent)} commands in the ring, {len(answered)} answers")
    return len(answered) > 0 and sent == answered


def tokens(model):
    print(*logits(model + "golden.safetensors")["tokens"], sep=",")
    return True


def golden(model, out, device):
    import numpy as np

    gold, got = logits(model + "golden.safetensors"), logits(out + "/logits.safetensors")["logits"]
    chosen = read(out + "/generate.json")["tokens"]
    error = float(np.abs(got[:48] - gold["logits"]).max() / np.abs(gold["logits"]).max())
    bound = 5e-3 if device == "cuda" else 2e-4
    equal = chosen == gold["greedy"].tolist()
    print(
        f"  {model:40} {device:5} max |diff| / max |logit| {error:.2e} (bound {bound:.0e}), "
        f"24 greedy tokens {'equal' if equal else 'DIFFER'}"
    )
    return error <= bound and equal


def parted(out, prompt):
    import numpy as np

    graph, cuda = (read(f"{out}/generate-{device}.json")["tokens"] for device in ("eval", "cuda"))
    rows_of = {device: logits(f"{out}/{device}.safetensors")["logits"] for device in ("eval", "cuda")}
    same = next((i for i, (a, b) in enumerate(zip(graph, cuda)) if a != b), len(graph))
    rows = len(prompt.split(",")) + min(same, len(graph) - 1)
    error = float(np.abs(rows_of["eval"][:rows] - rows_of["cuda"][:rows]).max())
    top = np.sort(rows_of["eval"][:rows], axis=1)
    margin = float((top[:, -1] - top[:, -2]).min())
    print(
        f"  prompt {prompt[:24]:24} {same} of {len(graph)} tokens equal; "
        f"max |diff| {error:.1e}, closest call of the graph {margin:.1e}"
    )
    # Where they diverge, the margin of the graph's top two logits must be below the bound on the device's error.
    call = float(top[rows - 1, -1] - top[rows - 1, -2])
    bound = 5e-3 * float(np.abs(rows_of["eval"][rows - 1]).max())
    return len(cuda) == 64 and (graph == cuda or call <= bound)


def same(path):
    equal = json.load(sys.stdin)["tokens"] == read(path)["tokens"]
    print("  the folder and the preset give", "the same tokens" if equal else "DIFFERENT tokens")
    return equal


CHECKS = {check.__name__: check for check in (correct, gpus, ring, tokens, golden, parted, same)}

if __name__ == "__main__":
    sys.exit(0 if CHECKS[sys.argv[1]](*sys.argv[2:]) else 1)
