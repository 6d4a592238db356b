"""Each script as a user runs it: in a process of its own, without network."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from conftest import ROOT

SCRIPTS = ("01_pilot_gradient_angle", "02_acl_embed", "03_acl_grad")


def run_script(name, *flags, **environment):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1", **environment}
    return subprocess.run([sys.executable, str(ROOT / f"{name}.py"), *flags], env=environment, capture_output=True,
                          encoding="utf-8", timeout=170)


@pytest.mark.parametrize("name", SCRIPTS)
def test_bare(name, tmp_path):
    """First line, a line per epoch, a table, records that parse, a figure; nothing on stderr."""
    result = run_script(name, "--epochs", "1", "--limit", "64", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("task toy: 64 train, 800 dev, 2 classes") and "torch" in lines[0]
    assert any("epoch 1/1: loss" in line for line in lines)
    table = [line for line in lines if line.startswith("| ")]
    assert "score" in table[0] and len({len(line) for line in table[:4]}) == 1
    records = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    assert len(records) == {"01": 2, "02": 3, "03": 2}[name[:2]]
    for record in records:
        assert record["settings"]["epochs"] == len(record["epochs"]) == 1
        assert record["epochs"][0]["seconds"] > 0 and len(record["epochs"][0]["angles"]["all"]) == 2
    assert not list(tmp_path.rglob("*.tmp"))
    assert len(list(tmp_path.rglob("angles.png"))) == (0 if name[:2] == "02" else 1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name):
    result = run_script(name, "--help")
    assert result.returncode == 0 and "--seeds" in result.stdout and "python " + name in result.stdout


@pytest.mark.parametrize("flags, parts", [
    (["--tau", "0"], ["--tau", "'0'", "> 0"]), (["--lam", "1.5"], ["--lam", "'1.5'", "≤ 1"]),
    (["--epochs", "0"], ["--epochs", "≥ 1"]), (["--seeds", "1", "1"], ["--seeds", "distinct"]),
    (["--angl", "80"], ["unrecognized", "--angl"]), (["--angle", "181"], ["--angle", "≤ 180"]), (["--lr", "nan"], ["--lr", "'nan'"]),
    (["--max_length", "129"], ["--max_length", "129", "≤ 128"]), (["--device", "quantum"], ["--device", "quantum"]),
    (["--task", "rte", "--model", "tiny"], ["--model", "toy"]),
    (["--task", "rte", "--data_dir", "absent"], ["absent", "RTE"])])
def test_bad_flag(monkeypatch, capsys, flags, parts):
    """One sentence naming the flag, what was found and what was expected; exit code 2."""
    from common import run
    from conftest import load_script
    monkeypatch.setattr(sys, "argv", ["03_acl_grad.py", *flags])
    with pytest.raises(SystemExit) as error:
        run(load_script("03_acl_grad").main)
    message = capsys.readouterr().err.splitlines()[-1]
    assert error.value.code == 2 and all(part in message for part in parts), message


def test_no_network():
    """A hub that doesn't answer: asked once, one clear message with the ways on, exit code 2, no stack trace."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        def refuse():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                asked.append(time.time())
                connection.close()
        threading.Thread(target=refuse, daemon=True).start()
        result = run_script("03_acl_grad", "--task", "rte", HF_HUB_OFFLINE="0", NO_PROXY="*",
                            HF_ENDPOINT=f"http://127.0.0.1:{server.getsockname()[1]}")
    assert result.returncode == 2 and len(asked) == 1
    assert "Traceback" not in result.stderr and len(result.stderr.splitlines()) == 1
    for part in ("--task rte", "127.0.0.1", "--data_dir", "HF_HUB_OFFLINE=1", "--task toy"):
        assert part in result.stderr


def test_offline_with_an_empty_cache(tmp_path):
    result = run_script("03_acl_grad", "--task", "rte", HF_HOME=str(tmp_path))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "--data_dir" in result.stderr.splitlines()[-1]
