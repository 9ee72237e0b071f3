from __future__ import annotations

import json
from pathlib import Path

import pytest

from bert_ds import bench_data


def test_the_benchmark_measures_and_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.jsonl", tmp_path / "out" / "speed"
    text.write_text("".join(json.dumps({"text": f"The cat {number} sat. A dog ran after it. " * 9}) + "\n"
                            for number in range(200)))
    arguments = ["--input", str(text), "--rounds", "2", "--mapping-sentences", "20000", "--written-sentences", "2000",
                 "--consumed-seconds", "0.3", "--output", str(output)]
    assert bench_data.main([*arguments[:2], "--rounds", "0"]) == 2
    assert bench_data.main(arguments) == 0
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["cores"] >= 1 and report["versions"]["numpy"] and "--rounds 2" in report["command"]
    by_name = {measured["name"]: measured for measured in report["measurements"]}
    assert len(by_name) == 9
    assert all(len(measured["ours"]) == 2 and min(measured["ours"]) >= 0 for measured in by_name.values())
    assert len(by_name["tokenising sentences, warm"]["peer"]) == 2
    table = output.with_suffix(".md").read_text()
    assert all(f"| {name} |" in table for name in by_name) and report["processor"] in table
    capsys.readouterr()
