"""`amk serve` driven by OpenAI's and Anthropic's public Python clients, its figures read by Prometheus's parser and shown by `amk top`. No GPU, no download.

    python3 -m venv target/clients && target/clients/bin/pip install -r tests/serve/requirements.txt
    target/clients/bin/python tests/serve/client.py target/release/amk
"""

import concurrent.futures
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request

import apis
import openai
from prometheus_client.openmetrics.parser import text_string_to_metric_families

GOLDEN = "corpus/golden/llama3-rope-bf16"
MODEL = "llama3-rope-bf16"


@contextlib.contextmanager
def serving(amk, *arguments, key="none", log=subprocess.DEVNULL):
    command = [amk, "serve", "--addr", "127.0.0.1:0", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        announced = json.loads(server.stdout.readline())
        assert announced["schema"] == "amk.serve.v2", announced
        url = announced["url"]
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30) as client:
            yield client, server, announced
        if server.poll() is None:
            server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0, server.returncode
    finally:
        server.kill()


def requests_inside(client):
    return client.get("/../health", cast_to=object)["requests"]


def models_and_completions(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "amk"
    ask = dict(model=MODEL, prompt="naïve 日本語 🦀", max_tokens=40)
    drawn = client.completions.create(seed=7, temperature=0.9, top_p=0.95, **ask)
    assert drawn.usage.completion_tokens <= 40 and drawn.usage.prompt_tokens > 5, drawn.usage
    assert drawn.choices[0].finish_reason in ("length", "stop")
    again = client.completions.create(seed=7, temperature=0.9, top_p=0.95, stream=True, **ask)
    pieces = [chunk.choices[0].text for chunk in again]
    assert "".join(pieces) == drawn.choices[0].text, (pieces, drawn)
    other = client.completions.create(seed=8, temperature=0.9, top_p=0.95, **ask)
    assert other.choices[0].text != drawn.choices[0].text
    greedy = [client.completions.create(temperature=0, seed=seed, **ask) for seed in (1, 2)]
    assert greedy[0].choices[0].text == greedy[1].choices[0].text
    narrow = client.completions.create(seed=3, extra_body={"top_k": 1}, **ask)
    assert narrow.choices[0].text == greedy[0].choices[0].text
    scored = client.completions.create(logprobs=3, temperature=0, **ask).choices[0]
    for logprob, top in zip(scored.logprobs.token_logprobs, scored.logprobs.top_logprobs):
        assert logprob <= 0 and abs(max(top.values()) - logprob) < 1e-9, (logprob, top)
    stop = greedy[0].choices[0].text[6:9]
    stopped = client.completions.create(temperature=0, stop=[stop], **ask).choices[0]
    assert stopped.finish_reason == "stop" and stop not in stopped.text, stopped
    assert greedy[0].choices[0].text.startswith(stopped.text)
    # A token may be forced, and one may be banned.
    forced = client.completions.create(logit_bias={"100": 100}, seed=1, **ask)
    assert len(set(forced.choices[0].text)) <= 4, forced
    first = client.completions.create(temperature=0, logprobs=1, **ask).choices[0].logprobs.tokens[0]
    return drawn, first


def chat(client):
    ask = dict(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello?"}]},
        ],
        max_completion_tokens=24,
        seed=11,
    )
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **ask)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content, answer
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 2 and token.top_logprobs[0].logprob >= token.logprob - 1e-9
    text, usage, roles = "", None, 0
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask):
        usage = chunk.usage or usage
        for delta in (choice.delta for choice in chunk.choices):
            roles += delta.role == "assistant"
            text += delta.content or ""
    assert text == choice.message.content and roles == 1, (text, answer)
    assert usage == answer.usage, (usage, answer.usage)


def refusals(client):
    def refused(kind, param, **arguments):
        fields = dict(model=MODEL, prompt="x") | arguments
        try:
            client.completions.create(**fields)
        except kind as error:
            assert error.body["param"] == param, (param, error.body)
            return error
        raise AssertionError(f"{arguments} was served")

    refused(openai.NotFoundError, "model", model="other")
    refused(openai.BadRequestError, "n", n=0)
    refused(openai.BadRequestError, "best_of", best_of=2)
    refused(openai.BadRequestError, "suffix", suffix="x")
    refused(openai.BadRequestError, "presence_penalty", presence_penalty=2.5)
    refused(openai.BadRequestError, "top_p", top_p=1.5)
    refused(openai.BadRequestError, "logit_bias", logit_bias={"99999": 1})
    error = refused(openai.BadRequestError, "max_tokens", max_tokens=100_000)
    assert error.code == "context_length_exceeded", error.body
    message = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    try:
        client.chat.completions.create(model=MODEL, messages=message, tools=tools)
    except openai.BadRequestError as error:
        assert error.param == "tools", error.body
    else:
        raise AssertionError("the template of this model has no tools")


def alone_and_together(client, expected):
    """A seed gives its tokens whatever runs beside it."""
    ask = dict(model=MODEL, prompt="naïve 日本語 🦀", max_tokens=40, temperature=0.9, top_p=0.95)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        seeds = [7, 1, 7, 2, 7, 3, 7, 4, 7, 5, 7, 6]
        tiers = ["flex", "default", "priority"] * 4
        answers = pool.map(lambda seed, tier: client.completions.create(seed=seed, extra_body={"service_tier": tier}, **ask), seeds, tiers)
        texts = [answer.choices[0].text for answer in answers]
    assert {text for seed, text in zip(seeds, texts) if seed == 7} == {expected}, texts
    assert len(set(texts)) == 7, texts


def full_and_cancelled(client):
    """One place in the queue: the next request is told to come back, and a client that goes makes room."""
    ask = dict(model=MODEL, prompt=[5], temperature=0, logit_bias={"1": -100, "2": -100})
    stream = client.completions.create(stream=True, max_tokens=2000, **ask)
    next(iter(stream))
    try:
        client.completions.create(max_tokens=1, **ask)
        raise AssertionError("the queue was full")
    except openai.RateLimitError as error:
        assert int(error.response.headers["retry-after"]) >= 1
    stream.close()
    began = time.monotonic()
    while requests_inside(client) and time.monotonic() - began < 5:
        time.sleep(0.01)
    waited = time.monotonic() - began
    assert client.completions.create(max_tokens=1, **ask).usage.completion_tokens == 1
    return waited


def figures(url):
    """The metrics as Prometheus's own parser reads them: the value of each sample by its name and labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["content-type"].startswith("application/openmetrics-text"), answer.headers
        text = answer.read().decode()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("amk_") and family.documentation, family
        assert not family.unit or family.name.endswith("_" + family.unit), family
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in samples, place
            samples[place] = sample.value
    return samples


def total(samples, name, **labels):
    wanted = set(labels.items())
    return sum(value for (found, have), value in samples.items() if found == name and wanted <= set(have))


def metrics(client, url):
    """What was sent is what is counted."""
    answers = [
        client.completions.create(model="toy", prompt=list(range(1, prompt + 1)), max_tokens=limit, seed=prompt, extra_body={"service_tier": tier})
        for prompt, limit, tier in [(3, 5, "default"), (30, 20, "flex"), (1, 1, "priority"), (7, 12, "default")]
    ]
    chosen = [answer.usage.completion_tokens for answer in answers]
    fed = [answer.usage.prompt_tokens + answer.usage.completion_tokens - 1 for answer in answers]
    began = time.monotonic()
    while total(samples := figures(url), "amk_occupancy", state="empty") < total(samples, "amk_places") and time.monotonic() - began < 10:
        time.sleep(0.01)
    assert total(samples, "amk_tokens_total") == sum(chosen), samples
    assert total(samples, "amk_tokens_total", priority="low") == chosen[1]
    assert total(samples, "amk_positions_total") == sum(fed) == total(samples, "amk_step_duration_seconds_count")
    for finish in ("stop", "length"):
        expected = sum(answer.choices[0].finish_reason == finish for answer in answers)
        assert total(samples, "amk_sequences_ended_total", outcome=finish) == expected, (finish, samples)
    assert total(samples, "amk_commands_published_total") == total(samples, "amk_commands_drained_total") > 0
    later = figures(url)
    assert all(later[place] >= value for place, value in samples.items() if place[0].endswith(("_total", "_bucket", "_count")))


def shown(amk, leave):
    """`amk top` in a terminal: it draws, takes a new size, ends with a key and leaves the terminal as it was."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    top = subprocess.Popen([amk, "top", "--every", "50"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    drawn = b""

    def until(word):
        nonlocal drawn
        began = time.monotonic()
        while word not in drawn:
            assert time.monotonic() - began < 20 and top.poll() is None, (word, drawn[-3000:])
            if select.select([ours], [], [], 0.1)[0]:
                drawn += os.read(ours, 65536)

    try:
        until(b"sequences")
        drawn = b""
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.kill(top.pid, signal.SIGWINCH)
        until(b"q ends")  # the last line has moved
        os.write(ours, leave)
        until_left = time.monotonic()
        while top.poll() is None:
            assert time.monotonic() - until_left < 20, "it does not end"
            if select.select([ours], [], [], 0.05)[0]:
                drawn += os.read(ours, 65536)
        while select.select([ours], [], [], 0.1)[0]:
            drawn += os.read(ours, 65536)
        assert top.returncode == 0, (top.returncode, drawn)
        assert b"\x1b[?1049l" in drawn and b"\x1b[?25h" in drawn, drawn[-500:]
        assert termios.tcgetattr(theirs) == before, "the terminal is as it was"
    finally:
        top.kill()
        os.close(ours)
        os.close(theirs)


def main():
    amk, began = sys.argv[1], time.monotonic()
    with serving(amk, "--model", GOLDEN, "--device", "eval") as (client, *_):
        drawn, _ = models_and_completions(client)
        chat(client)
        refusals(client)
        alone_and_together(client, drawn.choices[0].text)
        apis.fixed_lengths(client, MODEL)
        apis.prompts_and_scores(client, MODEL)
        apis.choices_and_penalties(client, MODEL)
        apis.other_apis(str(client.base_url).rstrip("/"), MODEL)
        apis.known_metrics(client, MODEL)
        assert requests_inside(client) == 0
    with tempfile.TemporaryDirectory() as folder:
        apis.with_tools(GOLDEN, folder)
        with serving(amk, "--model", folder, "--served-model-name", MODEL, "--device", "eval") as (client, *_):
            apis.formats_and_tools(client, MODEL)
    names = ["first", "second"]
    options = ["--served-model-name", names[0], "--served-model-name", names[1], "--cors", "https://page.example"]
    with tempfile.TemporaryFile("w+") as log:
        arguments = ["--model", GOLDEN, "--device", "eval", "--api-key", "sesame", *options]
        with serving(amk, *arguments, key="sesame", log=log) as (client, *_):
            apis.names_and_tokens(client, names)
        log.seek(0)
        apis.logged(log.read())
    with serving(amk, "--model", GOLDEN, "--device", "cpu") as (client, server, _):
        apis.prompts_and_scores(client, MODEL)
        apis.drained(client, server, MODEL)
    with serving(amk, "--model", GOLDEN, "--device", "cpu", "--queue", "1") as (client, *_):
        waited = full_and_cancelled(client)
    with serving(amk, "--model", "toy", "--device", "cpu", "--metrics", "127.0.0.1:0") as (client, _, announced):
        metrics(client, announced["metrics"])
        shown(amk, b"q")
        shown(amk, b"\x03")
        answer = client.completions.create(model="toy", prompt=[1, 2, 3], max_tokens=5, temperature=0)
        assert len(answer.choices[0].text.split()) == answer.usage.completion_tokens, answer
    print(f"completions, chat, messages, responses, figures, a terminal, 12 at once, a full queue, a cancellation ({waited * 1e3:.0f} ms): {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
