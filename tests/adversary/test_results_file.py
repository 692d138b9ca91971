"""Runs of classes are kept beside one another, each as it went last."""

import json
from pathlib import Path

from tests.adversary import report, results_file
from tests.adversary.promises import Adversary
from tests.adversary.report import Row, Verdict


def verdict(adversary: Adversary, nodes: int, tries: int) -> Verdict:
    """One attack that reached nothing."""
    return Verdict(str(adversary), nodes, 7, [Row(str(adversary), "connect", tries, tries)])


def test_each_class_is_there_once_for_each_number_of_servers(tmp_path: Path) -> None:
    """In the order of the classes, one server first, whoever ran first."""
    for each in (
        verdict(Adversary.WORKER, 3, 1),
        verdict(Adversary.NOBODY, 3, 1),
        verdict(Adversary.WORKER, 1, 1),
        verdict(Adversary.WORKER, 3, 2),
    ):
        results_file.add(each, tmp_path)
    (file,) = tmp_path.glob("adversary-*.json")
    runs = json.loads(file.read_text())["runs"]
    found = [(run["nodes"], run["adversary"], run["rows"][0]["tries"]) for run in runs]
    assert found == [
        (1, Adversary.WORKER, 1),
        (3, Adversary.NOBODY, 1),
        (3, Adversary.WORKER, 2),
    ]
    assert runs[1]["command"].endswith("--nodes 3 --class 'no credentials'")


def test_json_has_all_classes() -> None:
    """With the number of holes, which is the exit status's reason."""
    hole = Row("a stolen worker", "connect", 1, 0, changed=["KV_keys was written"])
    verdicts = [verdict(Adversary.NOBODY, 1, 1), Verdict("a stolen worker", 1, 0, [hole])]
    found = json.loads(report.as_json(verdicts))
    assert [each["adversary"] for each in found["classes"]] == ["no credentials", hole.adversary]
    assert found["holes"] == 1
    assert report.has_failed(report.rows_of(verdicts))
