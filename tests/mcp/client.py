"""A night's search in small, driven by the public Python client of the Model Context Protocol. No GPU.

    python3 -m venv target/clients && target/clients/bin/pip install -r tests/mcp/requirements.txt
    target/clients/bin/python tests/mcp/client.py target/release/amk

The client checks every structured answer against the tool's output schema and raises when it does not fit.
"""

import asyncio
import json
import pathlib
import sys
import tempfile
import time

from mcp import Client, StdioServerParameters

TOOLS = {"propose", "evaluate", "loop", "status", "runs", "compare", "report", "explain", "trace", "replay", "doctor"}
TOY = {"model": "toy", "device": "cpu"}


async def answer(client, tool, **arguments):
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result
    return result.structured_content


async def refusal(client, tool, **arguments):
    result = await client.call_tool(tool, arguments)
    assert result.is_error, result
    return json.loads(result.content[0].text)


async def what_there_is(client):
    tools = (await client.list_tools()).tools
    assert {tool.name for tool in tools} == TOOLS, tools
    assert all(tool.output_schema for tool in tools)
    pages = {str(page.uri) for page in (await client.list_resources()).resources}
    assert pages == {"amk://harness", "amk://knobs"}, pages
    for page in pages:
        text = (await client.read_resource(page)).contents[0].text
        assert "pipeline.stages" in text, page
    prompts = {prompt.name for prompt in (await client.list_prompts()).prompts}
    assert prompts == {"tune", "explain_run"}, prompts
    filled = await client.get_prompt("tune", {"model": "toy"})
    assert "amk://harness" in filled.messages[0].content.text, filled


async def three_edits(client):
    proposed = await answer(client, "propose", **TOY)
    space = proposed["search_space"]
    assert space["pipeline.stages"]["max"] >= proposed["schedule_config"]["pipeline"]["stages"]
    latencies = []
    for edit in ({"pipeline": {"stages": 4}}, {"fusion_grouping": {"merge": "separate"}}):
        verdict = await answer(client, "evaluate", config=edit, **TOY)
        assert verdict["correct"] and verdict["latency_kind"] == "predicted", verdict
        latencies.append(verdict["latency_us"])
    assert latencies[0] != latencies[1], latencies
    illegal = {"pipeline": {"stages": 99, "stage": 1}}
    verdict = await refusal(client, "evaluate", config=illegal, **TOY)
    assert [v["at"] for v in verdict["violations"]] == ["pipeline.stages", "pipeline.stage"], verdict
    error = await refusal(client, "evaluate", config=illegal, model="toy", device="gpu", sed=1)
    assert len(error["violations"]) == 4, error
    for violation in verdict["violations"]:
        explained = await answer(client, "explain", name=violation["rule"])
        assert explained["entries"][0]["kind"] == "rule", explained


async def a_search_that_is_cancelled(client, folder):
    """Sixteen trials, cancelled half-way. Returns the trials that were done."""
    seen, half = [], asyncio.Event()

    async def progress(done, total, message):
        seen.append((done, total, message))
        if done >= 8:
            half.set()

    # A budget that takes a while, so that there is something to cancel.
    arguments = {"budget": 100_000, "out": "night", **TOY}
    search = asyncio.create_task(client.call_tool("loop", arguments, progress_callback=progress))
    await asyncio.wait_for(half.wait(), 60)
    assert (await answer(client, "status"))["search"]["state"] == "running"
    busy = await refusal(client, "evaluate", **TOY)
    assert busy["message"].startswith("busy: "), busy
    search.cancel()
    try:
        await search
        raise AssertionError("a cancelled call has a result")
    except asyncio.CancelledError:
        pass
    began = time.monotonic()
    while (status := await answer(client, "status"))["doing"] != "idle":
        assert time.monotonic() - began < 60, status
        await asyncio.sleep(0.02)
    done = [entry[0] for entry in seen]
    assert done == sorted(set(done)), done
    ended = status["search"]
    rows = (folder / "night" / "ledger.jsonl").read_text().splitlines()
    trials = sum('"kind":"trial"' in row for row in rows)
    assert ended["state"] == "interrupted" and ended["trials"] == trials >= 8, (ended, trials)
    return trials


async def drive(amk, folder):
    server = StdioServerParameters(command=str(amk), args=["mcp"], cwd=str(folder))
    async with Client(server) as client:
        await what_there_is(client)
        await three_edits(client)
        trials = await a_search_that_is_cancelled(client, folder)
        found = await answer(client, "loop", resume=True, out="night", budget=trials + 8)
        assert found["n_trials"] == trials + 8 and found["stopped_by"] == "trials", found
        assert found["confirmation"]["decision"] == "kept", found["confirmation"]
        runs = (await answer(client, "runs", verify=True, paths=["night"]))["runs"]
        assert [run["holds"] for run in runs] == [True], runs
        led = await answer(client, "propose", ledger=runs[0]["ledger"], **TOY)
        assert led["schedule_config"] == found["best_config"], led
        # No search on predictions ends with the longest sleep.
        slow = {"kernel": {"poll_sleep_ns": 100}}
        difference = await answer(client, "compare", a=slow, b=runs[0]["ledger"].replace("ledger.jsonl", "best.json"))
        assert not difference["same"] and difference["knobs"], difference
        compared = await answer(client, "compare", a="night", b="night")
        assert compared["better"] == "equal", compared
        page = await answer(client, "report", runs=["night"], out="night.html")
        text = (folder / "night.html").read_text()
        assert page["bytes"] == len(text.encode()) and "<svg" in text and "<svg" not in json.dumps(page), page
        # A byte is flipped: the ledger must not hold, and the line is named.
        ledger = folder / "night" / "ledger.jsonl"
        text = ledger.read_bytes()
        place = text.index(b'"outcome"')
        ledger.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        runs = (await answer(client, "runs", verify=True, paths=["night"]))["runs"]
        assert not runs[0]["holds"] and runs[0]["line"] >= 1, runs
    return trials


def main():
    amk = pathlib.Path(sys.argv[1]).resolve()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trials = asyncio.run(drive(amk, pathlib.Path(folder)))
    print(f"MCP client: cancelled after {trials} trials, resumed, verified, {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
