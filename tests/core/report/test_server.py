"""`tltlab ui`: what it serves and to whom, that a run is followed while it is recorded, and how it ends."""

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.files import write_json
from tltlab.report.page import POLICY, Page, render
from tltlab.report.server import Runs, Server
from tltlab.traces.recorder import Recorder
from tltlab.traces.schema import Manifest

from ...traces_of_lengths import of_lengths

HOSTILE = "<script>alert(1)</script>"


def lengths(*tokens, name=None):
    trace = of_lengths(tokens, max_response_tokens=100)
    return trace.with_manifest(Manifest(kind="imported", name=name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs, one in the other, a trace with a hostile name, a folder that is neither, and links that lead out."""
    folder = tmp_path_factory.mktemp("runs")
    for path, lr in (("a", 0.1), ("a/inner", 0.2)):
        lengths(3, 40, 100, name=HOSTILE).write(folder / path / "trace")
        write_json(folder / path / "run.json", {"recipe": {"train": {"lr": lr, "steps": 3}}})
    lengths(7).write(folder / "deep" / "b & c")
    (folder / "notes").mkdir()
    outside = tmp_path_factory.mktemp("outside")
    lengths(7).write(outside / "secret")
    (folder / "link").symlink_to(outside)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with Server(Runs(folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(port, target, host=None, method="GET"):
    """Status, body and headers of an answer to exactly this request; `host` "" leaves the header out."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(method, target, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_list_has_each_run_and_run_its_page(server):
    _, page, _ = asked(server.server_port, "/")
    links = re.findall(r'href="(run\?run=[^"]*)"', page)
    assert sorted(links) == ["run?run=a", "run?run=a/inner", "run?run=deep/b%20%26%20c"]
    assert "secret" not in page
    _, page, _ = asked(server.server_port, "/run?run=a/inner")
    assert HOSTILE not in page
    assert "Response lengths" in page
    assert '<a href=".">All runs</a>' in page


def test_two_runs_stand_side_by_side(server):
    status, page, _ = asked(server.server_port, "/compare?run=a&run=a/inner")
    assert status == 200
    assert "A: a and B: inner" in page
    assert re.search(r"train\.lr</th>\s*<td[^>]*>0\.1</td>\s*<td[^>]*>0\.2</td>", page)
    assert "train.steps" not in page
    for query in ("run=a", "run=a&run=a&run=a", ""):
        status, page, _ = asked(server.server_port, f"/compare?{query}")
        assert status == 400
        assert "two are compared" in page


def test_a_page_is_made_once_and_holds_no_other_up(folder, monkeypatch):
    held, made = threading.Event(), []

    def report(path, **options):
        made.append(path.name)
        assert path.name != "inner" or held.wait(60)
        return Page(title=path.name)

    monkeypatch.setattr("tltlab.report.server.report", report)
    with Server(Runs(folder)) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        asking = [threading.Thread(target=asked, args=(server.server_port, "/run?run=a/inner")) for _ in range(3)]
        for thread in asking:
            thread.start()
        answers = [asked(server.server_port, *rest)[0] for rest in (("/run?run=a",), ("/",), ("/", "evil"), ("/x",))]
        assert answers == [200, 200, 421, 400]
        assert any(thread.is_alive() for thread in asking)
        held.set()
        for thread in asking:
            thread.join()
        server.shutdown()
        serving.join()
    assert sorted(made) == ["a", "inner"]


@pytest.mark.parametrize(
    "target",
    ["/run?run=../outside", "/run?run=/etc", "/run?run=%2e%2e%2f", "/run?run=link/secret", "/run?run=notes", "/run",
     "/run?run=a/../a", "/run?run=a%00", "/../../etc/passwd", "//etc/passwd", "/a/trace/manifest.json", "/state?run=x",
     "/run?run=" + "x" * 5000, "/%2e%2e/%2e%2e/etc/passwd", "http://evil.example/x", "/run?&&&", "*"],
)  # fmt: skip
def test_an_unknown_run_is_refused(server, target):
    status, page, headers = asked(server.server_port, target)
    assert 400 <= status < 500
    assert "root:" not in page
    assert headers["Content-Security-Policy"].startswith(POLICY)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", "127.0.0.1.evil.example:80", ""]
)
def test_a_site_whose_name_leads_here_gets_nothing(server, host):
    for target in ("/", "/run?run=a"):
        status, page, _ = asked(server.server_port, target, host)
        assert status == 421
        assert "deep" not in page
    assert asked(server.server_port, "/", f"localhost:{server.server_port}")[0] == 200


def test_nothing_can_be_changed_and_answers_are_strict(server):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert asked(server.server_port, "/", method=method)[0] == 501
    _, _, headers = asked(server.server_port, "/")
    policy = headers["Content-Security-Policy"]
    assert all(rule in policy for rule in ("default-src 'none'", "frame-ancestors 'none'"))
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_run_is_followed_while_it_is_recorded(tmp_path):
    runs, again = Runs(tmp_path), '<meta http-equiv="refresh" content="10">'
    write_json(tmp_path / "run" / "run.json", {"recipe": {}})
    assert "no trace yet" in render(runs.list_page())
    assert again not in render(runs.list_page())
    with Recorder(tmp_path / "run" / "trace", Manifest(kind="recorded")) as recorder:
        for step in range(2):
            for name in ("workload", "outcomes"):
                recorder.append(name, [row | {"rl_step": step} for row in lengths(3, 4).arrow(name).to_pylist()])
            recorder.flush()
            page = render(runs.page("run"))
            assert again in page
            assert "still being recorded" in page
            assert f"<dt>RL steps</dt><dd>{step + 1}</dd>" in page
        assert "<dt>being recorded</dt><dd>1</dd>" in render(runs.list_page())
        assert again in render(runs.list_page())
    page = render(runs.page("run"))
    assert "still being recorded" not in page
    assert again not in page
    assert page == render(runs.page("run"))
    assert "finished" in render(runs.list_page())


def test_an_unreadable_run_does_not_hide_others(folder, tmp_path):
    shutil.copytree(folder / "a", tmp_path / "good")
    shutil.copytree(folder / "a", tmp_path / "bad")
    (tmp_path / "bad" / "trace" / "outcomes.parquet").write_bytes(b"PAR1")
    runs = Runs(tmp_path)
    assert "outcomes.parquet" in render(runs.list_page())
    assert "outcomes.parquet" in render(runs.page("bad"))
    assert "outcomes.parquet" in render(runs.page("good", "bad"))
    assert "Response lengths" in render(runs.page("good"))


def test_the_command_states_where_it_serves(folder):
    command = [sys.executable, "-m", "tltlab", "ui", str(folder), "--port", "0", "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = json.loads(process.stdout.readline())
            assert told["runs"] == 3
            port = urlsplit(told["url"]).port
            assert asked(port, "/run?run=a")[0] == 200
            process.terminate()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refused(ConfigError, naming=("--port",)):
            Server(Runs(tmp_path), taken.getsockname()[1])
    with Server(Runs(tmp_path)) as server:
        assert server.server_port > 0
    assert server.socket.fileno() == -1, "it is closed with the server"
