"""What a grammar costs on a GPU: time per token of one client, with a JSON schema and without, in turns.

    grammar.py AMK PRESET GOLDEN [SERVE_ARGUMENT...]

GOLDEN is a folder of corpus/golden with a tokenizer.json: the preset gets its tokens, and random words up to its vocabulary's length. Prints per
temperature and kind the tokens, the mean of all, and percentiles of the gaps between events of the stream, in microseconds. AMK_ANSWERS answers of
each (40). The standard library only: the machine with the GPU has no network.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

TOKENS = 100
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
FIELDS = {"name": TEXT, "text": TEXT, "number": NUMBER, "flag": FLAG}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
KINDS = {"plain": {"ignore_eos": True}, "grammar": {"structured_outputs": {"json": SCHEMA}}}


def add_tokenizer(folder, golden):
    """Writes a tokenizer for the whole vocabulary of the model in a folder."""
    with open(f"{folder}/config.json") as file:
        length = json.load(file)["vocab_size"]
    with open(f"{golden}/tokenizer.json") as file:
        document = json.load(file)
    known = {**document["model"]["vocab"], **{token["content"]: token["id"] for token in document["added_tokens"]}}
    letters = random.Random(1)
    for number in range(1 + max(known.values()), length):
        word = None
        while word is None or word in known:
            word = letters.choice(["", " "]) + "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(2, 9)))
        known[word] = number
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
        document["added_tokens"].append({"id": number, "content": word, **flags})
    with open(f"{folder}/tokenizer.json", "w") as file:
        json.dump(document, file)


def start(amk, folder, more):
    """The server's process and URL."""
    command = [amk, "serve", "--model", folder, "--addr", "127.0.0.1:0", "--kv-capacity", "512", *more]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    answer = json.loads(server.stdout.readline() or "{}")
    if "url" not in answer:
        raise SystemExit(f"{' '.join(command)}: {answer}")
    return server, answer["url"]


def ask(url, kind, temperature, seed):
    """Times of the events of an answer with text, and its tokens."""
    body = {"prompt": list(range(1, 9)), "max_tokens": TOKENS, "temperature": temperature, "seed": seed, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **KINDS[kind]}
    request = urllib.request.Request(url + "/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    times, tokens = [], 0
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if event["choices"]:
                    times.append(time.perf_counter())
    return times, tokens


def main(amk, preset, golden, *more):
    answers, all_gaps, sums = int(os.environ.get("AMK_ANSWERS", "40")), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([amk, "export", "--model", preset, "--out", folder], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        add_tokenizer(folder, golden)
        server, url = start(amk, folder, more)
        try:
            for temperature in (0, 1):
                for seed in range(answers):
                    for kind in KINDS:
                        times, tokens = ask(url, kind, temperature, seed)
                        us, count = sums.get((temperature, kind), (0.0, 0))
                        sums[temperature, kind] = (us + (times[-1] - times[0]) * 1e6, count + tokens - 1)
                        all_gaps.setdefault((temperature, kind), []).extend((b - a) * 1e6 for a, b in zip(times, times[1:]))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    for (temperature, kind), (us, count) in sums.items():
        gaps = sorted(all_gaps[temperature, kind])
        at = {str(percent): round(gaps[len(gaps) * percent // 100]) for percent in (50, 90, 99)}
        print(json.dumps({"temperature": temperature, "kind": kind, "tokens": count, "mean_us": round(us / count, 1), "gaps_us": at}))


if __name__ == "__main__":
    main(*sys.argv[1:])
