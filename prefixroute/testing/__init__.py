"""What tests of a router need: upstreams and clients whose every byte is theirs to choose."""

from prefixroute.testing.client import RawAnswer, RawClient
from prefixroute.testing.policies import check_policy
from prefixroute.testing.upstream import Call, FakeUpstream, json_answer

__all__ = ["Call", "FakeUpstream", "RawAnswer", "RawClient", "check_policy", "json_answer"]
