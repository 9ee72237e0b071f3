"""Every check answers, finds what it is for, and neither crashes nor hangs the others."""

from __future__ import annotations

import ast
import json
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from bert_ds import doctor
from bert_ds.diagnosis import all_reduce, attention, compiler, devices, gradients, machine, network, versions
from bert_ds.diagnosis.checks import CHECKS, Entry
from bert_ds.diagnosis.disk import check_disk
from bert_ds.diagnosis.finding import Finding, Settings, Verdict
from bert_ds.diagnosis.run_checks import run_checks

HERE = Settings(save_dir=".")

OWN_CHECKS = """
import os, subprocess, sys, time
from pathlib import Path
from bert_ds.diagnosis.finding import Finding

def sound(settings):
    return [Finding(check="sound", verdict="fine", found=settings.save_dir)]

def dies(settings):
    print("about to die", flush=True)
    os.abort()

def raises(settings):
    raise ZeroDivisionError("no such luck")

def hangs(settings):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(settings.save_dir, "child").write_text(str(child.pid))
    time.sleep(60)

def right_and_wrong_gradients(settings):
    from bert_ds.compat import import_deepspeed
    from bert_ds.diagnosis.gradients import check_gradients
    import_deepspeed()
    from deepspeed.runtime.pipe.engine import PipelineEngine
    right = check_gradients(settings)
    reduce = PipelineEngine._exec_reduce_grads
    def divide_once_more(self):
        if self.stage_id == 0:
            for parameter in self.module.parameters():
                parameter.grad /= self.gradient_accumulation_steps()
        return reduce(self)
    PipelineEngine._exec_reduce_grads = divide_once_more
    PipelineEngine._INSTRUCTION_MAP = {
        kind: divide_once_more if action is reduce else action
        for kind, action in PipelineEngine._INSTRUCTION_MAP.items()}
    return [*right, *check_gradients(settings)]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Entry]:
    (tmp_path / "own_checks.py").write_text(OWN_CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def entry(name: str, limit_s: float = 20.0) -> Entry:
        return Entry(name, f"own_checks:{name}", limit_s, name, (("OMP_NUM_THREADS", "1"),))

    return entry


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_check_that_dies_raises_or_hangs_is_a_row(own: Callable[..., Entry], tmp_path: Path) -> None:
    entries = [own("dies"), own("hangs", limit_s=4.0), own("raises"), own("sound")]
    dies, hangs, raises, sound = run_checks(Settings(save_dir=str(tmp_path)), entries)
    assert dies.verdict == "problem" and dies.found == "the check ended with signal SIGABRT: about to die"
    assert hangs.verdict == "problem" and hangs.found == "no answer within 4 s"
    assert raises.verdict == "problem" and raises.found.endswith("exit code 1: ZeroDivisionError: no such luck")
    assert "python -m bert_ds.diagnosis.one_check own_checks:raises" in raises.repair
    assert sound == Finding(check="sound", verdict="fine", found=str(tmp_path))
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_without_time_left_checks_are_told_not_lost(own: Callable[..., Entry], tmp_path: Path) -> None:
    settings = Settings(save_dir=str(tmp_path))
    assert [(row.check, row.verdict) for row in run_checks(settings, [own("sound"), own("hangs")], total_s=0.5)] == [
        ("sound", "warning"), ("hangs", "warning")]


def test_gradients_of_this_deepspeed_are_right_and_shrunk_ones_are_found(own: Callable[..., Entry]) -> None:
    right, wrong = run_checks(HERE, [own("right_and_wrong_gradients", limit_s=100.0)])
    assert right.check == "gradients" and right.verdict == "fine"
    assert max(right.figures["relative_errors"]) < 1e-5
    assert wrong.verdict == "problem" and wrong.figures["ratios"] == pytest.approx([0.25, 1.0])
    assert "0.25 times the right ones on stage 0" in wrong.found


@pytest.mark.parametrize("factors", [(4.0, 4.0), (1.0, 1.001), (float("nan"), 1.0)])
def test_gradients_that_are_not_those_of_plain_torch_are_a_problem(factors: Sequence[float]) -> None:
    expected = gradients.expected_gradients()
    found = [gradient * factor for gradient, factor in zip(expected, factors, strict=True)]
    assert gradients.judge(expected, expected, "1").verdict == "fine"
    assert gradients.judge(expected, found, "1").verdict == "problem"


def test_all_that_costs_nothing_answers_here(tmp_path: Path) -> None:
    light = [entry for entry in CHECKS if entry.lane == "light"]
    rows = list(run_checks(Settings(save_dir=str(tmp_path / "not" / "yet")), light))
    assert {"Python", "torch", "DeepSpeed", "host memory", "shared memory", "open files", "host name", "port",
            "disk"} <= {row.check for row in rows}
    assert not [row for row in rows if "the check ended" in row.found or "no answer" in row.found]
    [disk] = [row for row in rows if row.check == "disk"]
    assert disk.figures["write_mb_s"] > 0 and not list(tmp_path.iterdir())


def test_versions_wanted_are_those_of_the_set_up() -> None:
    tree = ast.parse((Path(__file__).resolve().parent.parent / "setup.py").read_text())
    keywords = {keyword.arg: keyword.value for node in ast.walk(tree) if isinstance(node, ast.Call)
                for keyword in node.keywords}
    asked = ast.literal_eval(keywords["install_requires"])
    assert sorted(asked) == sorted(name + wanted for name, wanted in versions.REQUIRED.items())
    assert ast.literal_eval(keywords["python_requires"]) == versions.PYTHON


def test_versions_that_do_not_suit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.5.1", "deepspeed": "0.19.2", "numba": "0.59", "transformers": "4.40",
             "transformer_engine": "2.12.0"}
    monkeypatch.setattr(versions, "installed_version", there.get)
    monkeypatch.setattr("bert_ds.compat.installed_version", there.get)
    rows = {row.check: row for row in versions.check_versions(HERE)}
    assert rows["torch"].repair == 'pip install "torch>=2.6"' and rows["torch"].verdict == "problem"
    assert "scale the gradients of the early stages wrongly" in rows["DeepSpeed"].found
    assert rows["transformers"].verdict == "warning" and rows["transformer_engine"].verdict == "fine"
    assert "numba 0.59 is installed, and >=0.60 is needed; numpy is not installed" in rows["other packages"].found
    there["torch"] = "2.11.0a0+nv26.2"  # what NVIDIA's images carry
    assert {row.check: row for row in versions.check_versions(HERE)}["torch"].verdict == "fine"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("variables, verdict, says", [
    ({"MASTER_PORT": "TAKEN"}, "problem", "cannot be used (Address already in use)"),
    ({"MASTER_PORT": "70000"}, "problem", "MASTER_PORT=70000: is not a port"),
    ({"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29511"}, "not applicable", "is on another machine"),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "problem", "LOCAL_RANK=none: is not set beside RANK=1"),
    ({"MASTER_PORT": "TAKEN", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "fine", "held by torchrun"),
])
def test_the_meeting_point(monkeypatch: pytest.MonkeyPatch, taken_port: int, variables: dict[str, str],
                           verdict: str, says: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("TAKEN", str(taken_port)))
    [row] = [row for row in network.check_meeting_point(HERE) if row.check == "port"]
    assert row.verdict == verdict and says in row.found


def test_names_that_hang_a_start_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_loopback(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name == "nowhere":
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]

    monkeypatch.setattr(socket, "getaddrinfo", only_loopback)
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere")
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib9")
    rows = {row.check: row for row in network.check_meeting_point(HERE)}
    assert {name: row.verdict for name, row in rows.items()} == dict.fromkeys(("host name", "port", "interface"),
                                                                             "problem")
    assert "does not resolve" in rows["host name"].found and "/etc/hosts" in rows["host name"].repair
    assert "lo" in rows["interface"].found
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    monkeypatch.setenv("NUM_NODES", "2")
    assert "other machines cannot reach it" in network.check_meeting_point(HERE)[0].found
    monkeypatch.setenv("NUM_NODES", "1")
    assert network.check_meeting_point(HERE)[0].verdict == "fine"


@pytest.mark.parametrize("free, gpus, verdict", [(64 * 2**20, 0, "problem"), (512 * 2**20, 0, "warning"),
                                                 (4 * 2**30, 8, "warning"), (4 * 2**30, 2, "fine")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int, gpus: int, verdict: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2 * free, free, free))
    monkeypatch.setattr(machine, "gpus_here", lambda: gpus)
    [row] = machine.check_shared_memory(HERE, "/")
    assert row.verdict == verdict and ("--ipc=host" in row.repair) == (verdict != "fine")


def test_limits_and_forgotten_switches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1_048_576))
    assert machine.check_limits(HERE)[0].repair == "ulimit -n 1048576"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    [row] = machine.check_environment(HERE)
    assert row.verdict == "warning" and row.repair == "unset NCCL_P2P_DISABLE"


def test_a_folder_that_cannot_be_written_is_a_problem() -> None:
    [row] = check_disk(Settings(save_dir="/proc/checkpoints"))
    assert row.verdict == "problem" and row.found.startswith("/proc cannot be written")


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert {count: devices._ranks(count).verdict for count in (0, 2, 4, 8)} == {
        0: "fine", 2: "problem", 4: "fine", 8: "warning"}
    assert "--nproc-per-node 2" in devices._ranks(2).repair
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2a")
    [row] = devices._launcher(1)
    assert "by UUID" in row.found and "torchrun" in row.repair


def test_attention_kernels_are_timed_or_refuse_with_a_reason() -> None:
    row = attention._rows("local", "padded")
    assert row.verdict == "fine" and row.figures["ms"].keys() | row.figures["refused"].keys() == {
        "fused", "flash", "unfused", "local"}
    assert all(spent > 0 for spent in row.figures["ms"].values()) and "local" in row.figures["ms"]
    if not torch.cuda.is_available():
        assert row.figures["refused"]["fused"] == "it needs a GPU"
    slower = attention._judge("a", {"fused": 2.0, "flash": 1.0}, {}, {}, is_gpu=True)
    assert slower.verdict == "warning" and "--attention-backend flash" in slower.repair
    assert attention._judge("a", {"local": 1.0}, {}, {"fused": "no kernel"}, is_gpu=True).verdict == "problem"


def test_all_reduce_tells_nvlink_from_its_absence() -> None:
    fast = all_reduce.judge(8, {1: 50e-6, 256: 1.2e-3})
    assert fast.verdict == "fine" and fast.found == "8 GPUs: 1 MiB 37 GB/s, 256 MiB 391 GB/s"
    assert all_reduce.judge(2, {1: 1e-3, 256: 40e-3}).verdict == "warning"


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    [row] = compiler.check_compiler(HERE)
    assert row.verdict == "warning" and "C++ compiler" in row.found and "--compile" in row.repair


@pytest.mark.long
def test_the_compiler_compiles() -> None:
    [row] = compiler.check_compiler(HERE)
    assert row.verdict == "fine" and row.figures["seconds"] > 0


@pytest.mark.parametrize("verdict, code", [("fine", 0), ("warning", 0), ("problem", 2)])
def test_the_command_prints_a_table_writes_json_and_exits_by_the_worst(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], verdict: Verdict, code: int
) -> None:
    rows = [Finding(check="one", verdict="fine", found="well"),
            Finding(check="two", verdict=verdict, found="so " * 60, repair="mend it", figures={"x_s": 1.5})]
    monkeypatch.setattr(doctor, "run_checks", lambda settings: iter(rows))
    assert doctor.main(["--save", "x", "--json", str(tmp_path / "found.json")]) == code
    shown = capsys.readouterr().out
    assert f"two{' ' * 21}{verdict}" in shown and "-> mend it" in shown
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["verdict"] == verdict and written["findings"][1]["figures"] == {"x_s": 1.5}


def test_only_the_first_rank_of_a_machine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "run_checks", lambda settings: pytest.fail("a second rank looks"))
    assert doctor.main([]) == 0


def test_a_json_file_that_cannot_be_written_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "/nowhere/found.json"]) == 2
    assert "--json=/nowhere/found.json: its folder does not exist" in capsys.readouterr().err
