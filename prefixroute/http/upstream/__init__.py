"""The upstream side: attempts on instances, over connections that are kept.

`client` sends one attempt, a `request`; `pool` keeps an instance's connections; `link` is one of them,
`sending` what goes out on it; `place` says where the instance is; `answer` is what comes back.
"""

from prefixroute.http.upstream.answer import Answer, GarbledAnswerError, Interim
from prefixroute.http.upstream.client import Upstream
from prefixroute.http.upstream.pool import ConnectionLimits
from prefixroute.http.upstream.request import UpstreamRequest

__all__ = ["Answer", "ConnectionLimits", "GarbledAnswerError", "Interim", "Upstream", "UpstreamRequest"]
