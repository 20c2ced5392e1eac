"""What is read out of an instance's model list and metrics, and what is left unknown."""

from pathlib import Path

import pytest

from prefixroute.instance_facts import EventSource, InstanceFacts, read_event_sources, read_metrics, read_models

# What vLLM 0.32 and llama.cpp 11434 answered on /metrics.
DATA = Path(__file__).parent.parent / "data"
# The same, as far as it is read; long lines shortened.
VLLM = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79595956251e+09
# TYPE vllm:engine_sleep_state gauge
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 0.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",\
effective_attention_block_size="32",hash_block_size="None",kv_cache_size_tokens="131072",mamba_block_size="None",\
num_cpu_blocks="None",num_gpu_blocks="4096",num_gpu_blocks_override="None",user_specified_block_size="True"} 1.0
"""
# As of the releases before 0.11, by their own names: gpu_ where later ones say kv_ or nothing; no size of the cache in
# tokens, nothing of sleep.
OLD_VLLM = b"""\
process_start_time_seconds 1.75e+09
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="tiny"} 512.0
# TYPE vllm:gpu_prefix_cache_hits_total counter
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="tiny"} 256.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",cpu_offload_gb="0.0",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.9",num_cpu_blocks="None",num_gpu_blocks="27850",num_gpu_blocks_override="None",\
prefix_caching_hash_algo="builtin",sliding_window="None",swap_space="4.0",swap_space_bytes="4294967296.0"} 1.0
"""
LLAMA_CPP = b"# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 19844\n"


def test_vllm_tells_capacity_start_and_sleep() -> None:
    assert read_metrics(VLLM) == InstanceFacts(capacity_tokens=131_072, started_s=1795959562.51, asleep=False)


def test_other_servers_tell_nothing() -> None:
    assert read_metrics(LLAMA_CPP) == InstanceFacts()
    assert read_metrics(b"") == InstanceFacts()


def test_whole_captures_of_real_servers_are_read() -> None:
    assert read_metrics((DATA / "vllm_metrics.txt").read_bytes()) == read_metrics(VLLM)
    assert read_metrics((DATA / "llama_cpp_metrics.txt").read_bytes()) == InstanceFacts()


def test_older_vllm_tells_blocks_and_their_size() -> None:
    assert read_metrics(OLD_VLLM) == InstanceFacts(capacity_tokens=27_850 * 16, started_s=1.75e9)


def test_a_hybrid_model_holds_more_than_its_blocks_say() -> None:
    """Layers share blocks there: 320 blocks of 8 tokens hold 463,459."""
    line = b'vllm:cache_config_info{block_size="8",kv_cache_size_tokens="463459",num_gpu_blocks="320"} 1.0'

    assert read_metrics(line).capacity_tokens == 463_459


def test_engines_behind_one_address_add_up() -> None:
    line = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%s"} 1.0\n'

    assert read_metrics(line % (0, b"1000") + line % (1, b"500")).capacity_tokens == 24_000
    assert read_metrics(line % (0, b"1000") + line % (1, b"None")).capacity_tokens is None


def test_asleep_is_told() -> None:
    assert read_metrics(VLLM.replace(b'"awake"} 1.0', b'"awake"} 0.0')).asleep is True


@pytest.mark.parametrize(
    "text",
    [
        b"process_start_time_seconds",
        b"process_start_time_seconds \n",
        b"process_start_time_seconds soon",
        b"process_start_time_seconds NaN",
        b"process_start_time_seconds +Inf",
        b"# process_start_time_seconds 12",
        b"other_process_start_time_seconds 12",
        b'vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0',
        b'vllm:cache_config_info{hash_block_size="16",num_gpu_blocks="10"} 1.0',
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="0"} 1.0',
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="-1"} 1.0',
        b'vllm:cache_config_info{block_size="16',
        b'vllm:engine_sleep_state{sleep_state="awake"}',
        b'vllm:engine_sleep_state{sleep_state="awake"} yes',
        b"\xff\xfe\x00{}{}{ }\r\n",
        b"<html>not metrics</html>",
    ],
)
def test_what_cannot_be_understood_is_unknown(text: bytes) -> None:
    assert read_metrics(text) == InstanceFacts()


def test_timestamps_windows_line_ends_and_odd_labels_do_no_harm() -> None:
    assert read_metrics(b"process_start_time_seconds 12.5 1700000000000\r\n").started_s == 12.5
    assert read_metrics(b'vllm:engine_sleep_state{model_name="a } b",sleep_state="awake"} 1.0 17\n').asleep is False


def test_hostile_text_costs_no_more_than_its_length() -> None:
    """Each would take hours with a search that goes back; a time-out fails the test."""
    for text in (
        b"a" * 4_000_000,
        b"\nvllm:cache_config_info{" * 170_000,
        b"vllm:cache_config_info{" + b',block_size="1' * 300_000,
        b"vllm:cache_config_info{" + b'kv_cache_size_tokens="' * 190_000,
    ):
        assert read_metrics(text).capacity_tokens is None


def test_models_and_adapters_are_listed_by_id() -> None:
    body = (
        b'{"object":"list","data":[{"id":"org/base:tag","max_model_len":4096},{"id":"lora-a","parent":"org/base:tag"}]}'
    )

    listed = read_models(body)
    assert listed is not None
    assert listed.models == {"org/base:tag", "lora-a"}
    assert listed.adapters == {"lora-a"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"{}", b'{"data":null}', b'{"data":{}}', b'{"data":[]}',
        b'{"data":[null,1,{"id":null},{"id":""},{}]}', b"\xff", b"[" * 100_000,
    ],
)  # fmt: skip
def test_an_odd_model_list_is_unknown_rather_than_empty(body: bytes) -> None:
    assert read_models(body) is None


# Where KV events are


FIRST = b'{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": "kv", "hwm": 100000}'
SECOND = b'{"endpoint": "ipc:///x", "replay_endpoint": null}'


@pytest.mark.parametrize(
    "form",
    [b'{"0": %b, "1": %b}', b"[%b, %b]", b'{"sources": [%b, %b]}'],
    ids=["by rank", "list", "named list"],
)
def test_sources_of_events_in_each_form_that_vllm_has_written(form: bytes) -> None:
    expected = (EventSource("tcp://*:5557", "tcp://*:5558", "kv"), EventSource("ipc:///x"))
    assert read_event_sources(form % (FIRST, SECOND)) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b'{"sources": []}',
        b'{"detail": "Not Found"}',
        b'[5, {"endpoint": 5}]',
        b'[{"endpoint": "inproc://x"}]',
    ],
)
def test_no_sources_of_events(body: bytes) -> None:
    assert read_event_sources(body) == ()


@pytest.mark.parametrize("body", [b"", b"not found", b"5", b"null", b'{"sources": 5}'])
def test_what_tells_no_sources_of_events(body: bytes) -> None:
    assert read_event_sources(body) is None
