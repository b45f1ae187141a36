"""Servers that are started here end with `stop`, and with the process that started them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from flowrl_backends.servers.model_folder import linked_model
from flowrl_backends.servers.process import ServerProcess

# Starts a child, prints its number, and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
STARTER = """
import sys, time
from pathlib import Path
from flowrl_backends.servers.process import ServerProcess
server = ServerProcess([sys.executable, "-c", sys.argv[2]], {}, Path(sys.argv[1]))
time.sleep(600)
"""


def wait_until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "not within 30 s"
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    """False of a process that ended, also where its parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_stop_ends_a_server_and_what_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = ServerProcess([sys.executable, "-c", PARENT], {}, log)
    wait_until(lambda: log.read_text().endswith("\n"))
    child = int(server.last_words())
    assert is_there(child)
    assert not server.has_ended
    asyncio.run(server.stop())
    wait_until(lambda: not is_there(child))
    asyncio.run(server.stop())
    assert server.has_ended


def test_a_server_and_what_it_started_end_with_the_process_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with subprocess.Popen([sys.executable, "-c", STARTER, str(log), PARENT]) as starter:
        wait_until(lambda: log.read_text().endswith("\n"))
        child = int(log.read_text())
        assert is_there(child)
        os.kill(starter.pid, signal.SIGKILL)
        wait_until(lambda: not is_there(child))


def test_what_a_server_started_ends_with_a_server_that_dies(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = PARENT.replace("time.sleep(600)\n", "sys.exit()\n")
    server = ServerProcess([sys.executable, "-c", code], {}, log)
    wait_until(lambda: server.has_ended)
    assert not is_there(int(server.last_words()))


def test_a_server_gets_its_variables_but_not_the_modules_of_this_process(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import os; print(os.environ.get('PYTHONPATH'), os.environ['LEVEL'])"
    server = ServerProcess([sys.executable, "-c", code], {"LEVEL": "low"}, tmp_path / "log")
    wait_until(lambda: server.has_ended)
    assert server.last_words() == "None low"


def test_the_end_of_a_long_output_is_its_last_words(tmp_path: Path) -> None:
    code = "print('x' * 5000); raise SystemExit('no such device')"
    server = ServerProcess([sys.executable, "-c", code], {}, tmp_path / "log")
    wait_until(lambda: server.has_ended)
    assert server.last_words().endswith("x\nno such device")
    assert len(server.last_words()) < 2000


def test_a_linked_model_ends_at_the_stop_tokens_of_the_run(tmp_path: Path) -> None:
    model, weights = tmp_path / "model", tmp_path / "weights"
    model.mkdir()
    weights.mkdir()
    (model / "config.json").write_text('{"eos_token_id": 7, "vocab_size": 9}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("old")
    (weights / "model-1.safetensors").write_text("new")
    linked = linked_model(tmp_path / "linked", model, (2, 3))
    assert (linked / "config.json").read_text() == '{"eos_token_id": [2, 3], "vocab_size": 9}'
    assert (linked / "model.safetensors").read_text() == "old"
    other = linked_model(tmp_path / "other", model, (), weights)
    assert sorted(path.name for path in other.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "tokenizer.json",
    ]
    assert (other / "config.json").read_text() == '{"eos_token_id": null, "vocab_size": 9}'
