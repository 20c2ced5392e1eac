"""The processes that tokenize: in time or not at all, and whatever they meet, requests go on."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from prefixroute.config.settings import TokenizerSettings
from prefixroute.core.fleet import Instance
from prefixroute.core.prompt import Api, Prompt, read_prompt
from prefixroute.errors import ConfigError
from prefixroute.exact_tokens import setup
from prefixroute.exact_tokens.exact import ExactTokenizer, Options
from prefixroute.exact_tokens.probes import COMPLETION, CONVERSATIONS
from prefixroute.exact_tokens.service import ExactTokens, State, TokenOutcome
from prefixroute.exact_tokens.verify import Verdict, Verifier, compare

ModelDir = Callable[..., Path]

PATIENCE_S = 30.0
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
INSTANCES = [Instance("gpu-a", "http://gpu-a", 0, None), Instance("gpu-b", "http://gpu-b", 1, None)]


def body_of(text: str, **fields: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields})


def prompt_of(text: str, **fields: object) -> Prompt:
    return read_prompt(Api.CHAT, body_of(text, **fields))


def truth(directory: Path) -> ExactTokenizer:
    return ExactTokenizer(Options(str(directory), library="tokenizers"))


@asynccontextmanager
async def running(
    directory: Path, *, n_loaded: int = 1, check_every: int = 256, **options: Any
) -> AsyncIterator[ExactTokens]:
    """Exact tokens whose workers are ready; a generous budget unless given."""
    options = {"budget_s": PATIENCE_S, "verify": False, "restart_s": 0.0, **options}
    tokens = ExactTokens(Options(str(directory), library="tokenizers", check_every=check_every), **options)
    # Counted: two may be ready in one turn of the loop.
    loads = asyncio.Semaphore(0)
    tokens.on_loaded = loads.release
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(tokens.run())
        for _ in range(n_loaded):
            await loads.acquire()
        yield tokens
        task.cancel()


async def loaded(tokens: ExactTokens) -> None:
    event = asyncio.Event()
    tokens.on_loaded = event.set
    await event.wait()


def count(tokens: ExactTokens, outcome: TokenOutcome) -> int:
    return tokens.outcomes[outcome]


def state(tokens: ExactTokens) -> State:
    return tokens.state


# In order


async def test_a_prompt_gets_the_ids_that_the_engine_would_give_it(model_dir: ModelDir) -> None:
    directory = model_dir("llama3")
    async with running(directory) as tokens:
        ids = await tokens.of(Api.CHAT, prompt_of("Größe?"))
        assert ids == truth(directory).encode(Api.CHAT, body_of("Größe?"))
        assert state(tokens) is State.EXACT
        assert count(tokens, TokenOutcome.EXACT) == 1


async def test_answers_find_their_askers_when_many_ask_at_once(model_dir: ModelDir) -> None:
    directory = model_dir()
    exact = truth(directory)
    async with running(directory, n_processes=2, n_loaded=2) as tokens:
        texts = [f"text {i}" for i in range(12)]
        ids = await asyncio.gather(*(tokens.of(Api.CHAT, prompt_of(text)) for text in texts))
        assert ids == [exact.encode(Api.CHAT, body_of(text)) for text in texts]


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES, Api.GENERATE, Api.POOLING])
async def test_other_apis_are_left_to_bytes(model_dir: ModelDir, api: Api) -> None:
    tokens = ExactTokens(Options(str(model_dir())), verify=False)
    assert await tokens.of(api, prompt_of("hi")) is None
    assert count(tokens, TokenOutcome.UNSUPPORTED) == 1


async def test_prompts_for_other_models_are_left_to_bytes(model_dir: ModelDir) -> None:
    tokens = ExactTokens(Options(str(model_dir())), models=["other"], verify=False)
    assert await tokens.of(Api.CHAT, prompt_of("hi")) is None
    assert count(tokens, TokenOutcome.UNSUPPORTED) == 1


# Out of time


async def test_who_waits_too_long_goes_on_by_bytes_and_leaves_the_worker_in_order(model_dir: ModelDir) -> None:
    directory = model_dir()
    async with running(directory, budget_s=1e-6) as tokens:
        assert await tokens.of(Api.CHAT, prompt_of("late")) is None
        assert count(tokens, TokenOutcome.TIMEOUT) == 1
        # The late answer must not be taken for the next one's.
        assert await tokens.ask(Api.CHAT, body_of("next")) == truth(directory).encode(Api.CHAT, body_of("next"))


async def test_a_client_that_leaves_takes_no_place_with_it(model_dir: ModelDir) -> None:
    directory = model_dir()
    async with running(directory) as tokens:
        asking = [asyncio.create_task(tokens.of(Api.CHAT, prompt_of(f"{i}"))) for i in range(4)]
        await asyncio.sleep(0)
        for task in asking[:3]:
            task.cancel()
        assert await asking[3] == truth(directory).encode(Api.CHAT, body_of("3"))


async def test_a_full_line_is_not_joined(model_dir: ModelDir) -> None:
    async with running(model_dir()) as tokens:
        # One is worked on and eight wait.
        answers = await asyncio.gather(*(tokens.of(Api.CHAT, prompt_of(f"{i}")) for i in range(12)))
        assert [ids is None for ids in answers] == [False] * 9 + [True] * 3
        assert count(tokens, TokenOutcome.SATURATED) == 3


async def test_the_line_is_as_long_as_the_budget_allows(model_dir: ModelDir) -> None:
    async with running(model_dir()) as tokens:
        for i in range(60):
            await tokens.of(Api.CHAT, prompt_of(f"{i}"))
        answers = await asyncio.gather(*(tokens.of(Api.CHAT, prompt_of(f"{i}")) for i in range(40)))
        assert None not in answers
        assert count(tokens, TokenOutcome.SATURATED) == 0


# Faults


async def test_a_template_that_loops_is_ended_and_the_next_prompt_is_served(
    model_dir: ModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_dir(template="{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}fine")
    async with running(directory, job_limit_s=0.2) as tokens:
        again = asyncio.Event()
        tokens.on_loaded = again.set
        assert await tokens.of(Api.CHAT, prompt_of("loop")) is None
        assert count(tokens, TokenOutcome.FAULT) == 1
        assert state(tokens) is State.FAILED
        await again.wait()
        assert await tokens.of(Api.CHAT, prompt_of("hi")) == truth(directory).encode(Api.CHAT, body_of("hi"))
    assert "a prompt took its process longer than it may (a template that loops" in caplog.text


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**12) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x' * 10**12 }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ raise_exception('not ' + messages[0].content) }}",
        "{{ messages[0].content.__class__.__mro__ }}",
    ],
)
async def test_what_a_template_raises_costs_no_request_and_tells_no_prompt(
    model_dir: ModelDir, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    async with running(model_dir(template=template)) as tokens:
        for _ in range(2):
            assert await tokens.of(Api.CHAT, prompt_of("secret")) is None
        assert count(tokens, TokenOutcome.TEMPLATE_ERROR) == 2
        assert state(tokens) is State.EXACT
    assert caplog.text.count("the chat template raised") == 1
    assert "secret" not in caplog.text


async def test_files_that_cannot_be_used_are_told_and_routing_goes_on(
    model_dir: ModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_dir()
    (directory / "tokenizer.json").write_text("{")
    tokens = ExactTokens(Options(str(directory)), verify=False)
    told = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.set()

    listener = Listener(logging.ERROR)
    logging.getLogger("prefixroute.exact_tokens.service").addHandler(listener)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(tokens.run())
        await told.wait()
        assert state(tokens) is State.FAILED
        assert await tokens.of(Api.CHAT, prompt_of("hi")) is None
        assert count(tokens, TokenOutcome.NOT_IN_USE) == 1
        task.cancel()
    logging.getLogger("prefixroute.exact_tokens.service").removeHandler(listener)
    assert "tokenizer.path: no tokenizer can be made of tokenizer.json" in caplog.text


async def test_live_checks_are_counted(model_dir: ModelDir) -> None:
    async with running(model_dir(), check_every=2) as tokens:
        for text in ("a", "b", "c"):
            await tokens.of(Api.CHAT, prompt_of(text))
        assert (tokens.n_checks, tokens.n_check_faults) == (1, 0)


async def test_the_fast_library_gives_the_same_ids(model_dir: ModelDir, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory = model_dir("deepseek")
    tokens = ExactTokens(Options(str(directory), check_every=1), verify=False, budget_s=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(tokens.run())
        await loaded(tokens)
        ids = await tokens.of(Api.CHAT, prompt_of("Größe?"))
        task.cancel()
    assert ids == truth(directory).encode(Api.CHAT, body_of("Größe?"))
    assert (tokens.n_checks, tokens.n_check_faults) == (1, 0)
    assert "by fastokens (fastokens is equal on the whole sample)" in caplog.text


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'prefixroute\[tokenizers\]'"):
        setup.make_exact_tokens(TokenizerSettings(kind="huggingface", path="x"))
    assert setup.make_exact_tokens(TokenizerSettings()) is None


def test_files_can_be_checked_beforehand(model_dir: ModelDir) -> None:
    def settings(directory: Path, **more: object) -> TokenizerSettings:
        return TokenizerSettings.model_validate({"kind": "huggingface", "path": str(directory), **more})

    directory = model_dir()
    setup.check_files(TokenizerSettings())
    setup.check_files(settings(directory))
    with pytest.raises(ConfigError, match=r"there is no nowhere\.jinja"):
        setup.check_files(settings(directory, chat_template="nowhere.jinja"))
    with pytest.raises(ConfigError, match=r"tokenizer\.path: there is no .*nowhere"):
        setup.check_files(settings(directory / "nowhere"))
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        setup.check_files(settings(model_dir("llama3", template="{% if %}")))
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no tokenizer can be made of tokenizer\.json"):
        setup.check_files(settings(directory))


def test_a_tokenizer_needs_a_path() -> None:
    with pytest.raises(ValidationError, match="is required when tokenizer"):
        TokenizerSettings(kind="huggingface")


# Verification


class Engine:
    """Answers `/tokenize` by a tokenizer of its own, or as it is told to."""

    def __init__(self, directory: Path) -> None:
        self.exact = truth(directory)
        self.answer: Callable[[str, bytes], tuple[int, bytes] | None] | None = None
        self.asked: list[str] = []

    async def post(self, instance: Instance, path: str, body: bytes) -> tuple[int, bytes] | None:
        assert path == "/tokenize"
        self.asked.append(instance.name)
        if self.answer is not None:
            return self.answer(instance.name, body)
        return self.tokens(body)

    def tokens(self, body: bytes) -> tuple[int, bytes]:
        ids = self.exact.encode(Api.CHAT if b'"messages"' in body else Api.COMPLETIONS, body)
        tokens = [int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)]
        return 200, orjson.dumps({"count": len(tokens), "max_model_len": 1, "tokens": tokens})


async def test_tokens_are_used_once_an_instance_agrees_and_not_while_one_differs(
    model_dir: ModelDir, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_dir("qwen3")
    engine = Engine(directory)
    async with running(directory, verify=True) as tokens:
        verifier = Verifier(tokens, lambda: INSTANCES, engine.post)
        assert state(tokens) is State.UNVERIFIED
        assert await tokens.of(Api.CHAT, prompt_of("hi")) is None

        engine.answer = lambda _name, _body: None
        assert await verifier.verify() is Verdict.SILENT
        assert state(tokens) is State.UNVERIFIED

        engine.answer = None
        assert await verifier.verify() is Verdict.AGREES
        assert state(tokens) is State.EXACT
        assert await tokens.of(Api.CHAT, prompt_of("hi")) is not None

        # One of two is of another release: its tools look different.
        def other(name: str, body: bytes) -> tuple[int, bytes]:
            return (200, b'{"tokens":[1]}') if name == "gpu-b" and b"tools" in body else engine.tokens(body)

        engine.answer = other
        assert await verifier.verify() is Verdict.DIFFERS
        assert state(tokens) is State.MISMATCH
        assert await tokens.of(Api.CHAT, prompt_of("hi")) is None
        assert "gpu-b tokenises the probe 'tools' otherwise" in caplog.text

        # An instance that is not there takes nothing back.
        engine.answer = lambda _name, _body: None
        assert await verifier.verify() is Verdict.SILENT
        assert state(tokens) is State.MISMATCH

        engine.answer = None
        assert await verifier.verify() is Verdict.AGREES
        assert state(tokens) is State.EXACT
    n_probes = len(CONVERSATIONS) + len([COMPLETION])
    assert sum(verifier.verdicts.values()) == 5 * 2 * n_probes
    assert verifier.verdicts[Verdict.DIFFERS] == 2  # "tools" and "calls"


async def test_an_engine_that_tokenises_text_only_does_not_vouch_for_the_template(model_dir: ModelDir) -> None:
    directory = model_dir()
    engine = Engine(directory)
    engine.answer = lambda _name, body: (422, b"{}") if b'"messages"' in body else engine.tokens(body)
    async with running(directory, verify=True) as tokens:
        assert await Verifier(tokens, lambda: INSTANCES, engine.post).verify() is Verdict.SILENT
        assert state(tokens) is State.UNVERIFIED
    (directory / "tokenizer_config.json").write_text("{}")  # no template, none to vouch for
    async with running(directory, verify=True) as tokens:
        assert await Verifier(tokens, lambda: INSTANCES, engine.post).verify() is Verdict.AGREES


async def test_verification_begins_when_a_worker_is_ready(model_dir: ModelDir) -> None:
    directory = model_dir()
    engine = Engine(directory)
    tokens = ExactTokens(Options(str(directory), library="tokenizers"), budget_s=PATIENCE_S)
    asked = asyncio.Event()

    def answer(_name: str, body: bytes) -> tuple[int, bytes]:
        if b'"messages"' not in body:  # the last probe
            asked.set()
        return engine.tokens(body)

    engine.answer = answer
    verifier = Verifier(tokens, lambda: INSTANCES[:1], engine.post)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        work = [tasks.create_task(verifier.run()), tasks.create_task(tokens.run())]
        await asked.wait()
        await asyncio.sleep(0)
        assert state(tokens) is State.EXACT
        for task in work:
            task.cancel()


async def test_a_probe_that_the_template_loops_over_leaves_tokens_unused(model_dir: ModelDir) -> None:
    directory = model_dir(template=LOOPS)
    async with running(directory, verify=True, job_limit_s=0.2) as tokens:
        verifier = Verifier(tokens, lambda: INSTANCES, Engine(model_dir("llama3")).post)
        assert await verifier.verify() is Verdict.SILENT
        assert state(tokens) is State.FAILED


IDS = bytes((7, 0, 0, 0, 1, 1, 0, 0))


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (IDS, (200, b'{"tokens":[7,257]}'), Verdict.AGREES),
        (IDS, (200, b'{"tokens":[7,258]}'), Verdict.DIFFERS),
        (IDS, (200, b'{"tokens":[]}'), Verdict.SILENT),
        (None, (200, b'{"tokens":[7,257]}'), Verdict.DIFFERS),
        (IDS, (400, b"{}"), Verdict.SILENT),
        (IDS, (404, b'{"detail":"Not Found"}'), Verdict.SILENT),
        (IDS, (200, b'{"tokens":"x"}'), Verdict.SILENT),
        (IDS, (200, b'{"tokens":[-1]}'), Verdict.SILENT),
        (IDS, (200, b"[]"), Verdict.SILENT),
        (IDS, (200, b"<html>"), Verdict.SILENT),
        (IDS, None, Verdict.SILENT),
    ],
)
def test_only_an_answer_of_tokens_says_anything(
    ours: bytes | None, theirs: tuple[int, bytes] | None, verdict: Verdict
) -> None:
    assert compare(ours, theirs) is verdict
