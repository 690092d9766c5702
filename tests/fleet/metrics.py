"""The figures of a board, as Prometheus's own parser reads them: those of `amk fleet status`. No GPU, no download.

    python3 -m venv target/clients && target/clients/bin/pip install -r tests/serve/requirements.txt
    target/clients/bin/python tests/fleet/metrics.py target/debug/amk
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from prometheus_client.openmetrics.parser import text_string_to_metric_families


def read(text):
    """The value of each sample by its name and labels."""
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("amk_fleet_") and family.documentation, family
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in samples, place
            samples[place] = sample.value
    return samples


def main():
    amk = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        def run(words):
            command = [amk, *words.split()]
            return json.loads(subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=60).stdout)

        run("fleet submit --board b.sqlite --models toy --device cpu --budget 4")
        run("fleet worker --board b.sqlite --device cpu --until-done")
        run("fleet submit --board b.sqlite --models toy --device cpu --budget 4 --seeds 1,2")
        status = run("fleet status --board b.sqlite --metrics-file amk.prom")
        text = (pathlib.Path(folder) / "amk.prom").read_text()
    samples = read(text)
    # The parser must refuse what is cut off, or it shows nothing.
    try:
        read(text.removesuffix("# EOF\n"))
    except ValueError:
        pass
    else:
        raise AssertionError("a text that is cut off was read")

    def value(name, **labels):
        return samples[name, tuple(sorted(labels.items()))]

    for state, count in status["jobs"].items():
        assert value("amk_fleet_jobs", state=state) == count, state
    assert (status["jobs"]["done"], status["jobs"]["queued"]) == (1, 2), status["jobs"]
    for outcome in ("done", "failed", "expired", "given_back"):
        assert value("amk_fleet_attempts_total", outcome=outcome) == status["attempts"][outcome]
    [card] = status["cards"]
    assert value("amk_fleet_card_seconds_total", card="none", outcome="done") == card["seconds"]["done"] > 0
    [champion] = status["champions"]
    assert value("amk_fleet_champions", status=champion["status"]) == 1
    same = dict(model="toy", target="h200", contexts="", card="none", status="predicted")
    for bound, saved in zip(("low", "high"), champion["saved"]):
        assert value("amk_fleet_champion_saved_ratio", bound=bound, **same) == saved
    print(f"{len(samples)} samples of a board, all as in its status")


if __name__ == "__main__":
    main()
