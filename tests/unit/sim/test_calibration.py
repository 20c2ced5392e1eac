"""Load 1.0: found by its definition, kept in a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from prefixroute.core.policies.blind import RandomPolicy
from prefixroute.demo.engine import EngineConfig
from prefixroute.demo.report import percentile
from prefixroute.errors import ConfigError
from prefixroute.sim.calibration import SLOWDOWN, Calibration, Setting, calibrate, idle_ttft_s
from prefixroute.sim.run import FleetShape, Simulation
from prefixroute.sim.sources import FromTrace, Generated

SETTING = Setting(Generated("rag"), 200, 2)


@pytest.fixture(scope="module")
def full_rate() -> float:
    """Load 1.0 of SETTING. Found once: it takes some sixty runs."""
    return calibrate(SETTING)


def slowdown(setting: Setting, rate: float) -> float:
    """p90 of TTFT under random spreading, over that of idle servers, of five seeds together."""
    busy_s: list[float] = []
    idle_s: list[float] = []
    for seed in range(5):
        workload = setting.source.make(setting.n_requests, rate, seed)
        shape = FleetShape([1.0] * setting.n_instances)
        done = Simulation(workload, shape, lambda _: RandomPolicy(), seed=seed).run()
        busy_s += [one.ttft_s for one in done]
        idle_s += [idle_ttft_s(setting.engine, request.input_tokens) for request in workload.requests]
    busy = percentile(sorted(busy_s), 0.9)
    idle = percentile(sorted(idle_s), 0.9)
    assert busy is not None
    assert idle is not None
    return busy / idle


def test_load_one_is_where_waiting_makes_it_three_times_as_long(full_rate: float) -> None:
    assert slowdown(SETTING, full_rate) == pytest.approx(SLOWDOWN, rel=0.25)
    assert slowdown(SETTING, full_rate / 1.5) < SLOWDOWN < slowdown(SETTING, full_rate * 1.5)


def test_the_same_setting_has_the_same_rate() -> None:
    small = replace(SETTING, n_requests=60)
    assert calibrate(small) == calibrate(small)


def test_idle_servers_need_a_step_for_each_chunk() -> None:
    engine = EngineConfig(speed=2.0)
    assert idle_ttft_s(engine, 1) == pytest.approx((1 / 16_000 + 0.007) / 2, rel=1e-4)
    one_more = idle_ttft_s(engine, 8_193) - idle_ttft_s(engine, 8_192)
    assert one_more == pytest.approx(0.007 / 2, rel=0.02)


def test_twice_the_servers_take_about_twice_as_much(full_rate: float) -> None:
    more = calibrate(replace(SETTING, n_instances=4, n_requests=400))
    assert 1.6 < more / full_rate < 2.6


def test_where_nobody_ever_waits_there_is_no_load_one() -> None:
    with pytest.raises(ConfigError, match=r"noshare: 3 requests on 8 instances never wait .*give a rate"):
        calibrate(Setting(Generated("noshare"), 3, 8))


def test_what_fits_into_no_server_cannot_be_calibrated() -> None:
    with pytest.raises(ConfigError, match="no request fits"):
        calibrate(Setting(Generated("rag"), 10, 8, EngineConfig(kv_tokens=100)))


def test_rates_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.json"
    monkeypatch.setattr("prefixroute.sim.calibration.calibrate", lambda setting: 3.25)
    assert Calibration(path).rate(SETTING) == 3.25
    monkeypatch.setattr("prefixroute.sim.calibration.calibrate", lambda setting: pytest.fail("found again"))
    again = Calibration(path)
    assert again.rate(SETTING) == 3.25
    assert again.known(replace(SETTING, n_requests=301)) is None
    assert again.known(replace(SETTING, engine=EngineConfig(kv_tokens=1_000))) is None


def test_a_trace_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": %d, "output_length": 1, "hash_ids": [1]}\n'
    keys = []
    for name, n in (("a", 10), ("b", 11)):
        path = tmp_path / name / "trace.jsonl"
        path.parent.mkdir()
        path.write_text(line % n)
        keys.append(Setting(FromTrace((path,)), 10, 8).key())
    assert keys[0] != keys[1]
    assert not any(str(tmp_path) in key for key in keys)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rates": 1}', '{"rates": {"a": "b"}}'])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no file of calibrations"):
        Calibration(path)
