"""Twelve clients of `amk serve` on a GPU: one after the other, then all at once. Each must get the same answer both times.

    batches.py AMK MODEL BATCH [SERVE_ARGUMENT...]

With --batch 8 the requests share passes over the weights, and with a small --kv-pool some wait for pages. Every third request samples its tokens.
Prints the times as JSON; exits with 1 if an answer differs. The standard library only: the machine with the GPU has no network.
"""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

REQUESTS, NEW_TOKENS = 12, 200


def start(amk, model, sequences, more):
    """The server's process and URL: it prints a document once it answers."""
    command = [amk, "serve", "--model", model, "--device", "cuda", "--addr", "127.0.0.1:0", "--kv-capacity", "512", "--batch", sequences, *more]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    answer = json.loads(server.stdout.readline() or "{}")
    if "url" not in answer:
        raise SystemExit(f"{' '.join(command)}: {answer}")
    return server, answer["url"]


def ask(url, model, index):
    """One completion: its choice, and how many tokens that is."""
    body = {
        "model": model,
        "prompt": [(k * 131 + index * 977 + 7) % 49000 for k in range(1 + 5 * index)],
        "max_tokens": NEW_TOKENS,
        "temperature": 0.9 if index % 3 == 0 else 0.0,
        "top_p": 0.95,
        "seed": index,
    }
    request = urllib.request.Request(url + "/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    return answer["choices"][0], answer["usage"]["completion_tokens"]


def run(url, model, at_once):
    """All requests; answers in order, and seconds."""
    answers = [None] * REQUESTS

    def one(index):
        answers[index] = ask(url, model, index)

    began = time.monotonic()
    threads = [threading.Thread(target=one, args=(index,)) for index in range(REQUESTS)]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    return answers, time.monotonic() - began


def main():
    amk, model, sequences, *more = sys.argv[1:]
    server, url = start(amk, model, sequences, more)
    try:
        run(url, model, True)  # warm: pages and caches have been used before, in another order
        alone, alone_s = run(url, model, False)
        at_once, at_once_s = run(url, model, True)
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(30)
    differ = [index for index in range(REQUESTS) if alone[index] != at_once[index] or alone[index] is None]
    tokens = sum(answer[1] for answer in at_once if answer)
    print(json.dumps({"model": model, "sequences": int(sequences), "arguments": more, "tokens": tokens, "alone_tokens_per_s": round(tokens / alone_s), "at_once_tokens_per_s": round(tokens / at_once_s), "differ": differ, "exit": code}))
    return 1 if differ or code not in (0, 130) else 0


sys.exit(main())
