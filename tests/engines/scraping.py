"""What servers and routers say on `/metrics`, by Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from prefixroute.testing.client import RawClient


async def metrics_of(url: str) -> str:
    """The page of the server at `url`: an engine's, or a router's admin port."""
    async with RawClient(url) as client:
        answer = await client.request("GET", "/metrics")
    assert answer.status == 200
    return answer.body.decode()


async def total(url: str | None, sample: str, **labels: str) -> float:
    """Sum of the samples of that name with these labels, among others. Raises AssertionError where there are none."""
    assert url is not None, "the router has no admin port"
    found = [
        one.value
        for family in text_string_to_metric_families(await metrics_of(url))
        for one in family.samples
        if one.name == sample and labels.items() <= one.labels.items()
    ]
    assert found, f"{url} says nothing of {sample} {labels or ''}"
    return sum(found)
