"""The client of `determinism.online` against small servers: one that is deterministic, one whose results follow its load, broken ones."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from determinism import online

SMALL = ["--needles", "2", "--batch", "6", "--max-tokens", "5"]


class Completions(BaseHTTPRequestHandler):
    """Tokens and log-probabilities from the prompt's hash."""

    lock = threading.Lock()
    in_flight = 0

    def do_POST(self):
        cls = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with cls.lock:
            cls.in_flight += 1
        time.sleep(0.02)
        try:
            self.reply(200, json.dumps(self.answer(body)))
        finally:
            with cls.lock:
                cls.in_flight -= 1

    def reply(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def answer(self, body):
        assert self.path == "/v1/completions" and body["model"] == "tiny" and body["temperature"] == 0, body
        bytes_ = hashlib.sha256(body["prompt"].encode()).digest()[: body["max_tokens"]]
        tokens = [f"<{byte}>" for byte in bytes_]
        values = [self.logprob(byte) for byte in bytes_]
        top = [{token: value} for token, value in zip(tokens, values, strict=True)]
        return {"choices": [{"text": "".join(tokens), "logprobs": {"tokens": tokens, "token_logprobs": values, "top_logprobs": top}}]}

    def logprob(self, byte):
        return -byte / 255 - 0.1

    def log_message(self, *args):
        pass


class ByLoad(Completions):
    """The last bit of a log-probability follows the number of requests in flight."""

    def logprob(self, byte):
        return super().logprob(byte) * (1 + 2**-52 * (type(self).in_flight > 1))


class ByTurn(Completions):
    """Every later request gets other tokens, and one less."""

    turn = 0

    def answer(self, body):
        answer = super().answer(body)
        type(self).turn += 1
        if type(self).turn > 2:
            logprobs = answer["choices"][0]["logprobs"]
            logprobs["tokens"] = ["other", *logprobs["tokens"][1:-1]]
            logprobs["token_logprobs"], logprobs["top_logprobs"] = logprobs["token_logprobs"][:-1], None
        return answer


class WithIds(Completions):
    """Token ids, which go before texts, for those who ask with a key."""

    def answer(self, body):
        assert self.headers["Authorization"] == "Bearer secret" and body["return_token_ids"] is True
        answer = super().answer(body)
        answer["choices"][0]["token_ids"] = list(range(body["max_tokens"]))
        return answer


class WithoutLogprobs(Completions):
    def answer(self, body):
        return {"choices": [{"text": "hello", "logprobs": None}]}


class OfAnotherLength(Completions):
    def answer(self, body):
        answer = super().answer(body)
        answer["choices"][0]["logprobs"]["token_logprobs"][0:1] = []
        return answer


class NotANumber(Completions):
    """Equal to itself in a list, so that no comparison would find it."""

    def logprob(self, byte):
        return float("nan")


class NoCompletion(Completions):
    def answer(self, body):
        return {"message": "busy"}


class Refusing(Completions):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(404, '{"error": "The model `tiny` does not exist."}')


@contextmanager
def serving(handler):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(handler, *options):
    with serving(handler) as url:
        return online.main(["--url", url, "--model", "tiny", *SMALL, *options])


def test_a_deterministic_server_passes(capsys, tmp_path):
    assert run(Completions, "--json", str(tmp_path / "result.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["scenario", "comparisons", "differing", "max", "|delta|", "first", "difference"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["alone again", "in a batch of 6", "in reversed order"]
    assert lines[4] == "passed: 0 of 30 tokens differ from those of the needles alone"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["passed"] and result["model"] == "tiny" and result["batch"] == 6
    assert result["rows"][1] == {"name": "in a batch of 6", "comparisons": 10, "differing": 0, "first_difference": "", "max_delta": 0.0}


def test_one_bit_that_follows_the_load_fails(capsys, tmp_path):
    assert run(ByLoad, "--json", str(tmp_path / "result.json")) == 1
    out = capsys.readouterr().out
    again, batch, reverse = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert again["differing"] == 0 and batch["differing"] + reverse["differing"] > 0
    assert 0 < max(batch["max_delta"], reverse["max_delta"]) < 1e-15
    assert "FAILED" in out and "needle" in out and "against" in out


def test_other_tokens_and_missing_ones_differ():
    with serving(ByTurn) as url:
        again = online.check(online.Server(url, "tiny"), needles=2, batch=3, max_tokens=5)[0]
    assert (again.comparisons, again.differing, again.max_delta) == (10, 10, 0.0)
    assert again.first_difference.startswith("needle 0, token 0: '<") and "against 'other' -" in again.first_difference


def test_key_and_more_fields_and_token_ids(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert run(WithIds, "--api-key-file", str(key), "--extra", '{"return_token_ids": true}') == 0
    with serving(WithIds) as url:
        tokens = online.Server(url, "tiny", "secret", extra={"return_token_ids": True}).complete(online.Prompt("a b", 3))
    assert [token.token for token in tokens] == [0, 1, 2]


@pytest.mark.parametrize("handler, message", [
    (WithoutLogprobs, "answered without log-probabilities: choices[0].logprobs must have tokens and token_logprobs"),
    (OfAnotherLength, "answered without log-probabilities"),
    (NotANumber, "a number for each generated token"),
    (NoCompletion, 'answered something else than a completion: {"message": "busy"}'),
    (Refusing, "answered 404 Not Found: {\"error\": \"The model `tiny` does not exist.\"}"),
])
def test_what_is_wrong_with_a_server_is_said(handler, message, capsys):
    assert run(handler) == 2
    assert message in capsys.readouterr().err


def test_no_server(capsys):
    with serving(Completions) as url:
        pass
    assert online.main(["--url", url, "--model", "tiny"]) == 2
    assert f"error: {url}/completions cannot be reached: " in capsys.readouterr().err


@pytest.mark.parametrize("options, message", [
    (["--needles", "0"], "--needles 0"),
    (["--batch", "4"], "--batch 4 must be more than --needles 4"),
    (["--extra", "[1]"], "--extra [1] must be a JSON object"),
    (["--json", "/nowhere/x.json"], "--json /nowhere/x.json must be a file in a folder that exists"),
])
def test_bad_options(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        online.main(["--url", "http://127.0.0.1:1/v1", "--model", "tiny", *options])
    assert message in capsys.readouterr().err


def test_prompts_follow_the_seed():
    first, again, other = (online.random_prompt(online.random.Random(seed), 3) for seed in (1, 1, 2))
    assert first == again != other and len(first.text.split()) >= online.PROMPT_WORDS[0]


def test_it_needs_nothing_but_the_standard_library():
    script = "import sys, determinism.online; print({'torch', 'triton', 'numpy', 'triton_mla'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout.strip() == "set()"
