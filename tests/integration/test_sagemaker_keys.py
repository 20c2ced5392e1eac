"""Access keys: who signs as AWS's SDKs do is let in on the endpoints' paths, and nobody else. Secrets stay secret."""

import asyncio
import datetime as datetimes
import gzip
import json
import logging
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from prefixroute.app import App
from prefixroute.config import Settings
from prefixroute.errors import ConfigError
from prefixroute.security import Security
from prefixroute.testing import Call, FakeUpstream, RawClient
from prefixroute.testing.client import head
from prefixroute.testing.upstream import json_answer
from tests.integration.aws import (
    KEY_ID,
    SECRET,
    STREAM,
    WHOLE,
    Json,
    endpoint,
    endpoints,
    error_of,
    post,
    runtime,
    send,
)

Serve = Callable[..., AbstractAsyncContextManager[App]]
Finished = Callable[[], list[dict[str, Any]]]

BOB_ID, BOB_SECRET = "AKIDBOB012345678", "another-secret-of-forty-characters-or-so"
BEARER = "sk-carol-0123456789abcdef"
CHAT = "/endpoints/support-bot/openai/v1/chat/completions"
AWS = Path(sys.executable).with_name("aws")
LARGE = Random(3).randbytes(1_000_000)

both = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
lanes = pytest.mark.parametrize("lane", ["auto", "aiohttp"])


@pytest.fixture
def access_keys(tmp_path: Path) -> Path:
    path = tmp_path / "access-keys"
    path.write_text(f"alice: {KEY_ID} {SECRET}\nbob: {BOB_ID} {BOB_SECRET}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def api_keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"carol: {BEARER}\n")
    path.chmod(0o600)
    return path


def table(access_keys: Path, *those: Json) -> dict[str, Any]:
    return {"sagemaker": endpoints(*those, access_keys_file=str(access_keys))}


def signed(url: str, target: str, body: bytes, secret: str = SECRET, **headers: str) -> dict[str, str]:
    """Headers that sign a request as AWS's SDKs do, by botocore's own signer."""
    request = AWSRequest("POST", f"{url}{target}", {"Host": "router.test", **headers}, body)
    SigV4Auth(Credentials(KEY_ID, secret), "sagemaker", "eu-west-1").add_auth(request)
    return {name.replace("-", "_"): value for name, value in request.headers.items() if name != "Host"}


@lanes
@both
async def test_who_signs_with_a_known_key_is_let_in(
    serve: Serve, access_keys: Path, finished: Finished, streaming: bool, lane: str
) -> None:
    bodies = [b"", b'{"a": 1}', gzip.compress(b"{}", mtime=0), LARGE]
    async with (
        FakeUpstream() as upstream,
        serve(upstream, lane=lane, **table(access_keys)) as app,
        runtime(app.url) as alice,
        runtime(app.url, BOB_ID, BOB_SECRET, "a-session-token") as bob,
    ):
        for client in (alice, bob):
            for body in bodies:
                await (client.stream if streaming else client.invoke)(
                    body, ContentType="application/x-own", CustomAttributes="a  b", PrefixAwareId="app one"
                )
        assert upstream.bodies == bodies * 2
        for call in upstream.calls:
            assert not [
                name for name, _ in call.headers if name.lower().startswith(("authorization", "x-amz-", "amz-"))
            ]
            assert call.header("content-type") == "application/x-own"
        assert [line["key"] for line in finished()] == ["alice"] * 4 + ["bob"] * 4


@pytest.mark.parametrize(
    ("key_id", "secret", "code", "status"),
    [
        (KEY_ID, "a-wrong-secret", "InvalidSignatureException", 403),
        (KEY_ID, BOB_SECRET, "InvalidSignatureException", 403),
        ("AKIDNOBODY", SECRET, "UnrecognizedClientException", 403),
    ],
)
@both
async def test_who_signs_with_another_is_not(
    serve: Serve,
    access_keys: Path,
    finished: Finished,
    streaming: bool,
    key_id: str,
    secret: str,
    code: str,
    status: int,
) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, **table(access_keys)) as app,
        runtime(app.url, key_id, secret) as client,
    ):
        for body in (b"{}", LARGE):
            error = await client.refusal(body, streaming=streaming)
            assert error.response["Error"]["Code"] == code
            assert error.response["ResponseMetadata"]["HTTPStatusCode"] == status
        assert upstream.calls == []
        assert {line["key"] for line in finished()} == {None}
        assert {line["outcome"] for line in finished()} == {"refused"}


@pytest.mark.parametrize(("minutes", "is_good"), [(-6, False), (-4, True), (4, True), (6, False)])
async def test_a_signature_is_good_for_five_minutes(
    serve: Serve, access_keys: Path, monkeypatch: pytest.MonkeyPatch, minutes: int, is_good: bool
) -> None:
    def skewed(**_: object) -> datetime:
        return datetime.now(datetimes.UTC).replace(tzinfo=None) + timedelta(minutes=minutes)

    monkeypatch.setattr("botocore.auth.get_current_datetime", skewed)
    async with (
        FakeUpstream() as upstream,
        serve(upstream, **table(access_keys)) as app,
        runtime(app.url) as client,
    ):
        if is_good:
            await client.invoke()
        else:
            error = await client.refusal()
            assert error.response["Error"]["Code"] == "InvalidSignatureException"
            assert "clocks" in error.response["Error"]["Message"]
        assert len(upstream.calls) == is_good


@lanes
async def test_what_was_signed_cannot_be_changed_on_the_way(serve: Serve, access_keys: Path, lane: str) -> None:
    async with FakeUpstream() as upstream, serve(upstream, lane=lane, **table(access_keys)) as app:
        headers = signed(app.url, WHOLE, b'{"a": 1}', **{"X-Amzn-SageMaker-Target-Variant": "AllTraffic"})
        assert (await post(app.url, WHOLE, b'{"a": 1}', **headers)).status == 200
        for target, body, changed in (
            (WHOLE, b'{"a": 2}', {}),
            (WHOLE, b"", {}),
            (WHOLE, LARGE, {}),
            (STREAM, b'{"a": 1}', {}),
            (f"{WHOLE}?a", b'{"a": 1}', {}),
            (WHOLE.replace("support", "other"), b'{"a": 1}', {}),
            (WHOLE, b'{"a": 1}', {"X_Amzn_SageMaker_Target_Variant": "Other"}),
            (WHOLE, b'{"a": 1}', {"X_Amz_Security_Token": "another"}),
        ):
            answer = await post(app.url, target, body, **{**headers, **changed})
            status, name, _ = error_of(answer)
            assert (status, name) in ((403, "InvalidSignatureException"), (400, "IncompleteSignatureException"))
        assert len(upstream.calls) == 1


async def test_a_large_body_that_was_signed_comes_whole_from_a_slow_client(serve: Serve, access_keys: Path) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **table(access_keys)) as app:
        lines = [(n.replace("_", "-"), v) for n, v in signed(app.url, WHOLE, LARGE).items()]
        async with RawClient(app.url) as client:
            await client.send(head("POST", WHOLE, LARGE, lines))
            for start in range(0, len(LARGE), 400_000):
                await client.send(LARGE[start : start + 400_000])
                await asyncio.sleep(0.01)
            assert (await client.answer()).status == 200
        assert upstream.bodies == [LARGE]


async def test_a_client_that_waits_for_a_word_before_its_body_gets_one(serve: Serve, access_keys: Path) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **table(access_keys)) as app:
        lines = [(n.replace("_", "-"), v) for n, v in signed(app.url, WHOLE, b"body").items()]
        async with RawClient(app.url) as client:
            await client.send(head("POST", WHOLE, b"body", [*lines, ("Expect", "100-continue")]))
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(b"body")
            assert (await client.answer()).status == 200
        # Who is not known is told so before sending anything.
        async with RawClient(app.url) as client:
            unknown = [(n, v.replace(KEY_ID, "AKIDNOBODY")) for n, v in lines]
            await client.send(head("POST", WHOLE, b"body", [*unknown, ("Expect", "100-continue")]))
            answer = await client.answer()
            assert (answer.status, answer.interim) == (403, ())
        assert upstream.bodies == [b"body"]


async def test_a_signature_makes_no_body_where_there_is_none(serve: Serve, access_keys: Path) -> None:
    target = "/endpoints/support-bot/openai/v1/models/m"
    async with FakeUpstream() as upstream, serve(upstream, **table(access_keys)) as app:
        request = AWSRequest("GET", f"{app.url}{target}", {"Host": "router.test"})
        SigV4Auth(Credentials(KEY_ID, SECRET), "sagemaker", "eu-west-1").add_auth(request)
        async with RawClient(app.url) as client:
            lines = [(name, value) for name, value in request.headers.items() if name != "Host"]
            await client.send(head("GET", target, None, lines))
            assert (await client.answer("GET")).status == 200
        (call,) = upstream.calls
        assert (call.target, call.header("content-length")) == ("/v1/models/m", None)


async def test_bodies_whose_senders_are_not_known_yet_are_bounded(serve: Serve, access_keys: Path) -> None:
    """A key's id is no secret: who knows one gets as far as sending a body, and no further."""
    limits = {"max_body_bytes": 2_000_000}
    body = LARGE + LARGE
    async with FakeUpstream() as upstream, serve(upstream, limits=limits, **table(access_keys)) as app:
        forged = [(n.replace("_", "-"), v) for n, v in signed(app.url, WHOLE, body, "a-wrong-secret").items()]
        async with AsyncExitStack() as stack:
            forgers = [await stack.enter_async_context(RawClient(app.url)) for _ in range(4)]
            for client in forgers:
                await client.send(head("POST", WHOLE, body, [*forged, ("Expect", "100-continue")]))
                await client.reader.readuntil(b"\r\n\r\n")
            status, name, _ = error_of(await post(app.url, WHOLE, body, **signed(app.url, WHOLE, body)))
            assert (status, name) == (429, "ThrottlingException")
            # What is not large is no danger, and goes on.
            assert (await post(app.url, WHOLE, b"{}", **signed(app.url, WHOLE, b"{}"))).status == 200
            await forgers[0].send(body)
            assert error_of(await forgers[0].answer())[:2] == (403, "InvalidSignatureException")
            assert (await post(app.url, WHOLE, body, **signed(app.url, WHOLE, body))).status == 200
        assert upstream.bodies == [b"{}", body]


async def test_a_key_at_its_limit_is_told_so_before_its_body(serve: Serve, access_keys: Path) -> None:
    access_keys.write_text(f"alice: {KEY_ID} {SECRET} requests_per_minute=1\n")
    async with FakeUpstream() as upstream, serve(upstream, **table(access_keys)) as app, RawClient(app.url) as client:
        lines = [(n.replace("_", "-"), v) for n, v in signed(app.url, WHOLE, b"body").items()]
        await client.send(head("POST", WHOLE, b"body", lines) + b"body")
        assert (await client.answer()).status == 200
        await client.send(head("POST", WHOLE, b"body", [*lines, ("Expect", "100-continue")]))
        answer = await client.answer()
        assert (answer.status, answer.interim, answer.header("retry-after")) == (429, (), "60")


async def test_presigned_signatures_reach_no_container(serve: Serve) -> None:
    query = "a=b&X-Amz-Algorithm=AWS4-HMAC-SHA256&x-amz-security-token=TOKEN&X-Amz-Signature=00&c"
    async with FakeUpstream() as upstream, serve(upstream) as app:
        for path in (WHOLE, STREAM, CHAT):
            assert (await post(app.url, f"{path}?{query}")).status == 200
            assert (await post(app.url, f"{path}?X-Amz-Signature=00")).status == 200
        assert {call.target.rpartition("?")[2] for call in upstream.calls if "?" in call.target} == {"a=b&c"}
        assert sum("?" in call.target for call in upstream.calls) == 3


async def test_without_a_signature_nobody_is_let_in_anywhere(serve: Serve, access_keys: Path) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **table(access_keys)) as app:
        for path in (WHOLE, STREAM):
            status, name, _ = error_of(await post(app.url, path))
            assert (status, name) == (403, "MissingAuthenticationTokenException")
            status, name, _ = error_of(await post(app.url, path, Authorization="Bearer wrong"))
            assert (status, name) == (401, "AccessDeniedException")
        for path in ("/v1/chat/completions", "/invocations", "/anything", "/endpoints", "/endpoints/x"):
            assert (await post(app.url, path)).status == 401
            # A signature is for the endpoints' paths.
            assert (await post(app.url, path, b"{}", **signed(app.url, path, b"{}"))).status == 401
        assert (await send(app.url, "GET", "/v1/models")).status == 401
        assert (await send(app.url, "GET", "/ping")).status == 200
        assert upstream.calls == []


async def test_bearer_keys_and_signatures_are_both_good(
    serve: Serve, access_keys: Path, api_keys: Path, finished: Finished
) -> None:
    listen = {"port": 0, "api_keys_file": str(api_keys)}
    async with (
        FakeUpstream() as upstream,
        serve(upstream, listen=listen, **table(access_keys)) as app,
        runtime(app.url) as alice,
        openai.AsyncOpenAI(base_url=f"{app.url}{CHAT[:-17]}", api_key=BEARER, max_retries=0) as carol,
    ):
        await alice.invoke()
        assert (await post(app.url, WHOLE, Authorization=f"Bearer {BEARER}")).status == 200
        assert (await post(app.url, STREAM, x_api_key=BEARER)).status == 200
        await carol.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert (await post(app.url, CHAT, b"{}", **signed(app.url, CHAT, b"{}"))).status == 200
        assert (await post(app.url, "/v1/chat/completions", b"{}", x_api_key=BEARER)).status == 200
        # A signature that is no good is not made good by a key.
        assert (await post(app.url, WHOLE, x_api_key=BEARER, Authorization="AWS4-HMAC-SHA256 x")).status == 400
        assert [line["key"] for line in finished()] == ["alice", "carol", "carol", "carol", "alice", "carol", None]
        for call in upstream.calls:
            assert BEARER not in str(call.headers)
            assert call.header("authorization") is None


async def test_a_key_of_ours_beside_a_signature_stays_here_too(serve: Serve, access_keys: Path, api_keys: Path) -> None:
    listen = {"port": 0, "api_keys_file": str(api_keys)}
    async with FakeUpstream() as upstream, serve(upstream, listen=listen, **table(access_keys)) as app:
        assert (await post(app.url, WHOLE, b"{}", x_api_key=BEARER, **signed(app.url, WHOLE, b"{}"))).status == 200
        assert BEARER not in str(upstream.calls[0].headers)


async def test_with_bearer_keys_alone_signatures_are_not_looked_at(serve: Serve, api_keys: Path) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, listen={"port": 0, "api_keys_file": str(api_keys)}) as app,
        runtime(app.url) as client,
    ):
        error = await client.refusal()
        assert error.response["Error"]["Code"] == "AccessDeniedException"
        assert upstream.calls == []


async def test_errors_on_the_openai_path_are_openais(serve: Serve, access_keys: Path) -> None:
    async with FakeUpstream() as upstream, serve(upstream, **table(access_keys)) as app:
        async with openai.AsyncOpenAI(base_url=f"{app.url}{CHAT[:-17]}", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        answer = await post(app.url, CHAT, b"{}", **signed(app.url, CHAT, b"{}", "a-wrong-secret"))
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (403, "invalid_signature")
        assert upstream.calls == []


@both
async def test_a_key_has_limits_of_its_own(serve: Serve, tmp_path: Path, finished: Finished, streaming: bool) -> None:
    path = tmp_path / "access-keys"
    path.write_text(f"alice: {KEY_ID} {SECRET} in_flight=1\nbob: {BOB_ID} {BOB_SECRET} requests_per_minute=2\n")
    path.chmod(0o600)
    let_go = asyncio.Event()

    async def waits(call: Call) -> None:
        await let_go.wait()
        await json_answer({"ok": 1})(call)

    async with (
        FakeUpstream(waits) as upstream,
        serve(upstream, clock=lambda: 1_000.0, **table(path)) as app,
        runtime(app.url) as alice,
        runtime(app.url, BOB_ID, BOB_SECRET) as bob,
    ):
        under_way = asyncio.create_task((alice.stream if streaming else alice.invoke)())
        await upstream.wait_calls(1)
        error = await alice.refusal(streaming=streaming)
        assert error.response["Error"]["Code"] == "ThrottlingException"
        about = error.response["ResponseMetadata"]
        assert (about["HTTPStatusCode"], int(about["HTTPHeaders"]["retry-after"]) > 0) == (429, True)
        assert finished()[-1]["key"] == "alice"
        let_go.set()
        await under_way
        for _ in range(2):
            await (bob.stream if streaming else bob.invoke)()
        assert (await bob.refusal(streaming=streaming)).response["Error"]["Code"] == "ThrottlingException"
        await (alice.stream if streaming else alice.invoke)()


def test_one_name_has_one_set_of_limits_in_both_files(access_keys: Path, api_keys: Path) -> None:
    settings = Settings.model_validate(
        {"listen": {"api_keys_file": str(api_keys)}, "sagemaker": {"access_keys_file": str(access_keys)}}
    )
    api_keys.write_text(f"alice: {BEARER}\n")
    Security(settings, {}, clock=lambda: 0.0)
    api_keys.write_text(f"alice: {BEARER} in_flight=2\n")
    with pytest.raises(ConfigError, match="alice has other limits than in") as raised:
        Security(settings, {}, clock=lambda: 0.0)
    assert SECRET not in str(raised.value)


async def test_keys_may_change_while_the_router_works(serve: Serve, access_keys: Path) -> None:
    async with (
        FakeUpstream() as upstream,
        serve(upstream, **table(access_keys)) as app,
        runtime(app.url) as alice,
        runtime(app.url, BOB_ID, BOB_SECRET) as bob,
        runtime(app.url, KEY_ID, "a-new-secret-of-forty-characters-or-more") as new,
    ):
        await alice.invoke()
        await bob.invoke()
        access_keys.write_text(f"alice: {KEY_ID} a-new-secret-of-forty-characters-or-more\n")
        app.apply(app.settings)
        await new.invoke()
        assert (await alice.refusal()).response["Error"]["Code"] == "InvalidSignatureException"
        assert (await bob.refusal()).response["Error"]["Code"] == "UnrecognizedClientException"
        assert len(upstream.calls) == 3


async def test_no_secret_and_no_signature_is_ever_logged(
    serve: Serve, access_keys: Path, api_keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(call: Call) -> None:
        call.reset()

    caplog.set_level(logging.DEBUG)
    listen = {"port": 0, "api_keys_file": str(api_keys)}
    async with FakeUpstream() as upstream, serve(upstream, listen=listen, **table(access_keys, endpoint())) as app:
        good = signed(app.url, WHOLE, b"{}")
        assert (await post(app.url, WHOLE, b"{}", **good)).status == 200
        await post(app.url, WHOLE, b"changed", **good)
        await post(app.url, STREAM, b"{}", **good)
        await post(app.url, f"{WHOLE}?X-Amz-Signature=abc", b"{}")
        await post(app.url, CHAT, b"{}", **good)
        await post(app.url, WHOLE, Authorization=f"Bearer {BEARER}")
        await post(app.url, WHOLE, Authorization="Bearer wrong-key")
        await send(app.url, "GET", WHOLE, None, **good)
        upstream.script = fails
        assert (await post(app.url, WHOLE, b"{}", **signed(app.url, WHOLE, b"{}"))).status == 424
        app.apply(app.settings)
    signature = good["Authorization"].rpartition("Signature=")[2]
    said = "\n".join(
        f"{record.getMessage()} {record.__dict__}" for record in caplog.records if record.name.startswith("prefixroute")
    )
    assert "request" in said
    for secret in (SECRET, BOB_SECRET, BEARER, signature, "wrong-key", "AWS4-HMAC", "Authorization"):
        assert secret not in said


# The command line of AWS


async def aws(url: str, body: Path, out: Path, secret: str = SECRET) -> tuple[int, str]:
    """Exit code and standard error of `aws sagemaker-runtime invoke-endpoint`."""
    environment = {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "PATH": "/usr/bin:/bin",
    }
    asked = ["--endpoint-url", url, "--endpoint-name", "support-bot", "--body", f"fileb://{body}"]
    asked += ["--content-type", "application/json", str(out)]
    process = await asyncio.create_subprocess_exec(
        str(AWS), "sagemaker-runtime", "invoke-endpoint", *asked, env=environment, stdout=PIPE, stderr=PIPE
    )
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, errors.decode()


@pytest.mark.skipif(not AWS.exists(), reason="there is no aws command beside this interpreter (awscli has it)")
async def test_the_aws_command_invokes_endpoints(serve: Serve, access_keys: Path, tmp_path: Path) -> None:
    async def answers(call: Call) -> None:
        await json_answer({"bytes": len(call.body)}, status=400 if call.body == b"bad" else 200)(call)

    good, bad, out, none = (tmp_path / name for name in ("good", "bad", "out", "none"))
    good.write_bytes(b'{"a": "\xc3\xa9"}')
    bad.write_bytes(b"bad")
    async with FakeUpstream(answers) as upstream, serve(upstream, patience_s=60, **table(access_keys)) as app:
        done, refused, unknown = await asyncio.gather(
            aws(app.url, good, out), aws(app.url, bad, none), aws(app.url, good, none, secret="wrong")
        )
        assert done == (0, "")
        assert out.read_bytes() == b'{"bytes": 11}'
        assert sorted(upstream.bodies) == [b"bad", good.read_bytes()]
        assert (refused[0] > 0, "(ModelError)" in refused[1], "client error (400)" in refused[1]) == (True, True, True)
        assert (unknown[0] > 0, "(InvalidSignatureException)" in unknown[1]) == (True, True)
        assert not none.exists()
