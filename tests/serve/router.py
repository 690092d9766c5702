"""Two `amk serve` behind HAProxy with the configuration of packaging/: one is killed, and only its own streams break off.

    python3 tests/serve/router.py target/release/amk        (needs haproxy; no GPU, no download)
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time

CLIENTS = 8
TOKENS = 300
LIMIT = 20  # seconds for every wait


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(amk, name, port):
    arguments = ["--model", "toy", "--device", "eval", "--kv-capacity", "512", "--addr", f"127.0.0.1:{port}"]
    # The first name is that of answers: it tells who answered.
    names = ["--served-model-name", name, "--served-model-name", "toy"]
    server = subprocess.Popen([amk, "serve", *arguments, *names], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert json.loads(server.stdout.readline())["schema"] == "amk.serve.v2"
    return server


def ask(port, stream):
    """One request: who answered, and whether the answer is whole."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": TOKENS if stream else 8, "ignore_eos": True, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    who, text = None, b""
    try:
        answer = connection.getresponse()
        assert answer.status == 200, (answer.status, answer.read())
        while piece := answer.read1():
            text += piece
            if who is None and b'"model":"' in text:
                who = text.split(b'"model":"')[1].split(b'"')[0].decode()
        return who, text.endswith(b"[DONE]\n\n") if stream else json.loads(text)["usage"]["completion_tokens"] == 8
    except (http.client.HTTPException, OSError):
        return who, False
    finally:
        connection.close()


def load(port, until, answers):
    """Streams and whole answers in turn."""
    for number in range(10_000):
        if time.monotonic() > until:
            return
        stream = number % 2 == 0
        began = time.monotonic()
        answers.append((began, stream, *ask(port, stream)))


def main():
    amk = sys.argv[1]
    ports = [free_port() for _ in range(3)]
    servers = [serve(amk, name, port) for name, port in zip(("one", "two"), ports)]
    places = {name: f"127.0.0.1:{port}" for name, port in zip(("AMK_ONE", "AMK_TWO", "AMK_ROUTER"), ports)}
    config = os.path.join(os.path.dirname(__file__), "../../packaging/haproxy.cfg")
    router = subprocess.Popen(["haproxy", "-db", "-f", config], env={**os.environ, **places}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        began = time.monotonic()
        while ask_ready(ports[2]) != 200:
            assert time.monotonic() < began + LIMIT, "the router has no server"
            time.sleep(0.05)
        answers = []
        clients = [threading.Thread(target=load, args=(ports[2], time.monotonic() + 4, answers)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(1.5)
        killed = time.monotonic()
        servers[0].kill()
        for client in clients:
            client.join(2 * LIMIT)
            assert not client.is_alive(), "a client still waits"
        check(answers, killed)
    finally:
        for process in (router, *servers):
            process.kill()
            process.wait()


def ask_ready(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def check(answers, killed):
    broken = [answer for answer in answers if not answer[3]]
    after = [answer for answer in answers if answer[0] > killed]
    by = {name: sum(answer[2] == name for answer in answers) for name in ("one", "two")}
    print(f"{len(answers)} answers ({by}), {len(after)} asked for after the kill, {len(broken)} broken off")
    assert by["one"] > 4 and by["two"] > 4, "both answer"
    assert len(after) > 10, "the other goes on"
    assert 1 <= len(broken) <= CLIENTS, broken
    for began, stream, who, _ in broken:
        # Without a first token it is not known who answered.
        assert who in ("one", None) and stream and began < killed, (began - killed, stream, who)


main()
