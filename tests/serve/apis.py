"""What other clients and benchmarks use of the server: lists of prompts, scored prompts, choices, keys, the other APIs.

`client.py` runs these functions.
"""

import json
import pathlib
import re
import shutil
import signal
import threading
import time
import typing
import urllib.error
import urllib.request

import anthropic
import openai
import pydantic
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as classic

UNENDING = {"1": -100, "2": -100}


def root(client):
    return str(client.base_url).removesuffix("/v1/")


def http(url, body=None, method=None, **headers):
    """Status, headers and body; a refusal is an answer as well."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"} | headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def fixed_lengths(client, model):
    """Benchmarks fix the number of tokens: with `ignore_eos`, or with `min_tokens`."""
    ask = dict(model=model, prompt=[5, 6], max_tokens=30)
    force = dict(logit_bias={"2": 100}, temperature=0)
    ended = client.completions.create(**force, **ask)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1), ended
    for least in ({"ignore_eos": True}, {"min_tokens": 30}, {"ignore_eos": True, "min_tokens": 30}):
        fixed = client.completions.create(extra_body=least, **force, **ask)
        assert (fixed.choices[0].finish_reason, fixed.usage.completion_tokens) == ("length", 30), (least, fixed)
    some = client.completions.create(extra_body={"min_tokens": 7}, **force, **ask)
    assert (some.choices[0].finish_reason, some.usage.completion_tokens) == ("stop", 8), some


def prompts_and_scores(client, model):
    """What lm-evaluation-harness sends: several prompts at once, each echoed with the log probabilities of its tokens."""
    prompts = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7, 12]]
    ask = dict(model=model, temperature=0, logprobs=1, echo=True)
    answer = client.completions.create(prompt=prompts, max_tokens=1, **ask)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 11 and answer.usage.completion_tokens == 3, answer.usage
    for prompt, choice in zip(prompts, answer.choices):
        scores, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert len(scores) == len(top) == len(prompt) + 1 and scores[0] is None and top[0] is None, choice
        for score, likeliest in zip(scores[1:], top[1:]):
            assert score <= max(likeliest.values()) + 1e-9 <= 1e-9, (score, likeliest)
        alone = client.completions.create(prompt=prompt, max_tokens=0, **ask).choices[0]
        assert alone.logprobs.token_logprobs == scores[:-1] and alone.finish_reason == "length", (alone, scores)
        assert choice.text.startswith(alone.text), (choice.text, alone.text)
    # The score of a token in a prompt is its score when it is generated.
    greedy = client.completions.create(model=model, prompt=[5, 6], max_tokens=1, temperature=0, logprobs=1)
    token = json.loads(http(root(client) + "/tokenize", {"prompt": greedy.choices[0].text, "add_special_tokens": False})[2])["tokens"]
    if len(token) == 1:
        echoed = client.completions.create(prompt=[5, 6, *token], max_tokens=0, **ask).choices[0]
        assert abs(echoed.logprobs.token_logprobs[-1] - greedy.choices[0].logprobs.token_logprobs[0]) < 1e-6
    texts = client.completions.create(model=model, prompt=["one", "two"], max_tokens=4, echo=True, stream=True)
    parts = {0: "", 1: ""}
    for choice in (choice for chunk in texts for choice in chunk.choices):
        parts[choice.index] += choice.text
    assert parts[0].startswith("one") and parts[1].startswith("two"), parts


def choices_and_penalties(client, model):
    ask = dict(model=model, prompt=[5, 6], max_tokens=20, seed=4, logit_bias=UNENDING)
    three = client.completions.create(n=3, **ask)
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 3 and three.usage.completion_tokens == 60, three
    assert three.usage.prompt_tokens == 2, "the prompt is counted once"
    assert texts[0] == client.completions.create(**ask).choices[0].text, "the first choice has the seed itself"
    assert texts == [choice.text for choice in client.completions.create(n=3, **ask).choices]
    chat = dict(model=model, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=8, seed=1, n=2)
    said = ["", ""]
    for choice in (choice for chunk in client.chat.completions.create(stream=True, **chat) for choice in chunk.choices):
        said[choice.index] += choice.delta.content or ""
    assert said == [choice.message.content for choice in client.chat.completions.create(**chat).choices]
    # The bias makes one token certain, until a penalty outweighs it.
    ask = dict(model=model, prompt=[5, 6], max_tokens=12, temperature=0, logprobs=0, logit_bias={"100": 50})
    plain = client.completions.create(**ask).choices[0].logprobs.tokens
    assert set(plain) == {plain[0]}
    for penalty in ("presence_penalty", "frequency_penalty"):
        penalised = client.completions.create(**{penalty: 2.0}, **ask).choices[0].logprobs.tokens
        assert penalised[0] == plain[0], "the first token has no penalty"


def with_tools(golden, folder):
    """A copy of a model whose chat template has tools, in the form of Qwen."""
    shutil.copytree(golden, folder, dirs_exist_ok=True)
    template = "{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}<assistant>"
    (pathlib.Path(folder) / "chat_template.jinja").write_text(template)


def formats_and_tools(client, model):
    """A schema by OpenAI's own helper, and a conversation with a tool in both clients. The model has random weights."""
    class Pair(pydantic.BaseModel, extra="forbid"):
        x: typing.Literal[1, 2, 3]
        y: bool

    ask = dict(model=model, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=100, seed=3)
    parsed = client.chat.completions.parse(response_format=Pair, **ask).choices[0].message.parsed
    assert isinstance(parsed, Pair), parsed
    assert isinstance(client.responses.parse(model=model, input="Hi", text_format=Pair).output_parsed, Pair)
    schema = Pair.model_json_schema()
    ask |= dict(tools=[{"type": "function", "function": {"name": "add", "parameters": schema}}], tool_choice="required", parallel_tool_calls=False)
    choice = client.chat.completions.create(**ask).choices[0]
    call = choice.message.tool_calls[0]
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add"), choice
    Pair.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments, streamed
    ask["messages"] += [choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert client.chat.completions.create(**ask | {"tool_choice": "none"}).choices[0].message.tool_calls is None
    # The same in the newer API; the model's items go back as they came.
    flat = [{"type": "function", "name": "add", "parameters": schema, "strict": True}]
    ask = dict(model=model, input=[{"role": "user", "content": "Hi"}], tools=flat, max_output_tokens=100, extra_body={"seed": 3})
    with client.responses.stream(tool_choice={"type": "function", "name": "add"}, **ask) as stream:
        kinds = [event.type for event in stream]
        made = stream.get_final_response().output
    assert "response.function_call_arguments.done" in kinds and [item.type for item in made] == ["function_call"], (kinds, made)
    Pair.model_validate_json(made[0].arguments)
    ask["input"] += made + [{"type": "function_call_output", "call_id": made[0].call_id, "output": "3"}]
    assert client.responses.create(tool_choice="none", **ask).output[0].type == "message"
    with anthropic.Anthropic(base_url=root(client), api_key="none", max_retries=0, timeout=30) as other:
        assert other.messages.count_tokens(model=model, messages=[{"role": "user", "content": "Hi"}]).input_tokens > 0
        ask = dict(model=model, max_tokens=100, messages=[{"role": "user", "content": "Hi"}], tools=[{"name": "add", "input_schema": schema}])
        with other.messages.stream(tool_choice={"type": "tool", "name": "add"}, **ask) as stream:
            last = stream.get_final_message()
        assert last.stop_reason == "tool_use", last
        Pair.model_validate(last.content[0].input)
        result = {"type": "tool_result", "tool_use_id": last.content[0].id, "content": "3"}
        ask["messages"] += [{"role": "assistant", "content": last.content}, {"role": "user", "content": [result]}]
        assert other.messages.create(tool_choice={"type": "none"}, **ask).content[0].type == "text"


def other_apis(url, model):
    """Anthropic's own client, and OpenAI's for its newer API."""
    # This version of the client has no argument for the temperature.
    greedy = {"temperature": 0}
    ask = dict(model=model, max_tokens=12, extra_body=greedy, messages=[{"role": "user", "content": [{"type": "text", "text": "Hello?"}]}])
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=30) as client:
        whole = client.messages.create(system="Be brief.", **ask)
        assert whole.role == "assistant" and whole.content[0].type == "text", whole
        assert whole.stop_reason in ("max_tokens", "end_turn") and whole.usage.output_tokens <= 12, whole
        with client.messages.stream(system="Be brief.", **ask) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert text == whole.content[0].text == last.content[0].text, (text, whole)
        assert (last.stop_reason, last.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens), last
        stop = text[2:4]
        stopped = client.messages.create(system="Be brief.", stop_sequences=[stop], **ask)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop), stopped
        for wrong in ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
            try:
                client.messages.create(**wrong, **ask)
            except anthropic.BadRequestError as error:
                assert error.body["type"] == "error" and error.body["error"]["param"] in wrong, error.body
            else:
                raise AssertionError(f"{wrong} was served")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
        ask = dict(model=model, input="Hello?", instructions="Be brief.", max_output_tokens=16, temperature=0)
        whole = client.responses.create(**ask)
        assert whole.output_text and whole.status in ("completed", "incomplete"), whole
        assert whole.usage.output_tokens <= 16 and whole.instructions == "Be brief.", whole
        text, kinds = "", []
        for number, event in enumerate(client.responses.create(stream=True, **ask)):
            assert event.sequence_number == number, event
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert text == whole.output_text == event.response.output_text, (text, whole)
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{whole.status}", kinds
        listed = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "input_text", "text": "Hello?"}]}]
        assert client.responses.create(**(ask | {"input": listed, "instructions": None})).output_text == text
        try:
            client.responses.create(previous_response_id="resp_1", **ask)
        except openai.BadRequestError as error:
            assert error.param == "previous_response_id", error.body
        else:
            raise AssertionError("a stored response was continued")


def names_and_tokens(client, names):
    """A server with two names, an API key and an allowed origin."""
    url = root(client)
    key = {"authorization": "Bearer sesame"}
    assert [model.id for model in client.models.list()] == names
    ask = dict(prompt=[5], max_tokens=2, temperature=0)
    for name in names:
        assert client.completions.create(model=name, **ask).model == names[0]
    assert http(url + "/v1/completions", ask, **key)[0] == 200, "the model may be left out"
    for path in ("/health", "/ready"):
        assert http(url + path)[0] == 200
    for headers in ({}, {"authorization": "Bearer sesam"}, {"x_api_key": "sesame2"}):
        status, _, body = http(url + "/v1/models", **headers)
        assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key", body
    assert http(url + "/v1/models", x_api_key="sesame")[0] == 200
    assert set(json.loads(http(url + "/version", **key)[2])) == {"version"}
    status, headers, _ = http(url + "/v1/models", x_request_id="mine-1", **key)
    assert headers["x-request-id"] == "mine-1"
    assert http(url + "/nothing", **key)[1]["x-request-id"].startswith("req_")
    asked = {"prompt": "naïve 日本語 🦀", "return_token_strs": True}
    tokens = json.loads(http(url + "/tokenize", asked, **key)[2])
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) and tokens["max_model_len"] > 0, tokens
    text = json.loads(http(url + "/detokenize", {"tokens": tokens["tokens"]}, **key)[2])["prompt"]
    assert text.endswith(asked["prompt"]), text
    chat = json.loads(http(url + "/tokenize", {"messages": [{"role": "user", "content": "x"}]}, **key)[2])
    assert chat["count"] > 0, chat
    page = dict(origin="https://page.example", access_control_request_method="POST", access_control_request_headers="authorization,content-type")
    status, headers, _ = http(url + "/v1/completions", method="OPTIONS", **page)
    assert status == 204 and headers["access-control-allow-origin"] == "https://page.example", (status, headers)
    assert "POST" in headers["access-control-allow-methods"] and headers["access-control-allow-headers"] == "authorization,content-type"
    status, headers, _ = http(url + "/v1/models", origin="https://page.example", **key)
    assert status == 200 and headers["access-control-allow-origin"] == "https://page.example", headers
    assert http(url + "/v1/models", origin="https://other.example", **key)[0] == 403


def logged(lines):
    """One line per request, with the id of the answer; probes that succeeded and keys are left out."""
    served = re.compile(r"POST /v1/completions 200 prompt_tokens=1 cached=0 tokens=2 first_ms=[0-9.]+ ms=[0-9.]+ id=req_[0-9a-f]{16}")
    assert len(served.findall(lines)) == 3, lines
    assert re.search(r"^GET /v1/models 200 prompt_tokens=0 cached=0 tokens=0 first_ms=- ms=[0-9.]+ id=mine-1$", lines, re.MULTILINE), lines
    assert len(re.findall(r"^GET /v1/models 401 ", lines, re.MULTILINE)) == 3, lines
    assert not re.search(r"^GET /(health|ready) ", lines, re.MULTILINE) and "sesam" not in lines, lines


def known_metrics(client, model):
    """The names that routers and dashboards know, in both formats of Prometheus."""
    url = root(client) + "/metrics"

    def read(parse, **headers):
        text = http(url, **headers)[2]
        samples = {}
        for family in parse(text):
            for sample in family.samples:
                samples[sample.name, sample.labels.get("finished_reason"), sample.labels.get("le")] = sample.value
                assert not sample.name.startswith("vllm:") or sample.labels["model_name"] == model, sample
        return samples

    before = read(openmetrics, accept="application/openmetrics-text")
    used = [client.completions.create(model=model, prompt=[5] * n, max_tokens=n, logit_bias=UNENDING).usage for n in (2, 9)]
    after = read(openmetrics, accept="application/openmetrics-text")

    def rise(name, reason=None, bound=None):
        return after[f"vllm:{name}", reason, bound] - before.get((f"vllm:{name}", reason, bound), 0)

    assert rise("prompt_tokens_total") == sum(usage.prompt_tokens for usage in used) == 11
    assert rise("generation_tokens_total") == sum(usage.completion_tokens for usage in used) == 11
    assert rise("request_success_total", "length") == 2
    assert rise("time_to_first_token_seconds_count") == rise("e2e_request_latency_seconds_bucket", bound="+Inf") == 2
    assert rise("inter_token_latency_seconds_count") == rise("time_per_output_token_seconds_count") == 9
    # The other panels of vLLM's dashboard: one sample per sequence, and for the last one per request.
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "prompt_tokens", "generation_tokens", "max_num_generation_tokens"):
        assert rise(f"request_{name}_count") == 2, name
    assert rise("request_prompt_tokens_sum") == rise("request_generation_tokens_sum") == 11
    for gauge in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc"):
        assert after[f"vllm:{gauge}", None, None] >= 0
    older = read(classic)
    assert older["vllm:prompt_tokens_total", None, None] == after["vllm:prompt_tokens_total", None, None]
    assert any(name.startswith("amk_") for name, *_ in older)


def drained(client, server, model):
    """After SIGTERM a running stream is finished, and new requests are told to go elsewhere."""
    url = root(client)
    ask = dict(model=model, prompt=[5], max_tokens=1000, temperature=0, logit_bias=UNENDING)
    stream = iter(client.completions.create(stream=True, **ask))
    next(stream)
    rest = []
    reader = threading.Thread(target=lambda: rest.extend(stream))
    reader.start()
    server.send_signal(signal.SIGTERM)
    began, told = time.monotonic(), None
    while time.monotonic() - began < 5 and told is None:
        status, headers, body = http(url + "/ready")
        if status == 503:
            told = headers
    assert told and int(told["retry-after"]) >= 1 and told["x-request-id"], told
    status, headers, body = http(url + "/v1/completions", ask)
    assert status == 503 and headers["retry-after"] and "shutting down" in body, (status, body)
    reader.join(20)
    assert rest and rest[-1].choices[0].finish_reason == "length", rest[-1:]
