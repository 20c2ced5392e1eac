"""What an operator is told when predictions of cached tokens cease to hold for an instance, or hold again."""

import logging

from prefixroute.core.feedback import InstanceFeedback, Prediction

_log = logging.getLogger(__name__)

_REMEDIES = {
    Prediction.OVER: (
        "it caches much less than predicted: is prefix caching on, is its KV cache smaller than told, "
        "do others than this router send to it?"
    ),
    Prediction.UNDER: (
        "it caches much more than predicted, which is as it should be after a restart of this router; if it lasts: "
        "is there another router beside this one, or a cache behind the instance?"
    ),
    Prediction.SOUND: "caches what is predicted",
}


def tell_drift(name: str, one: InstanceFeedback) -> None:
    """One line for a change of `one.prediction`, with what to look at."""
    remedy = _REMEDIES.get(one.prediction)
    if remedy is None:
        return  # nothing is known of it: it was lost, which is told by whoever noticed
    ratio = one.recent_ratio
    fields = {
        "upstream": name,
        "prediction": one.prediction.value,
        "reported_to_predicted": None if ratio is None else round(ratio, 2),
    }
    level = logging.WARNING if one.prediction is Prediction.OVER else logging.INFO
    _log.log(level, "%s: %s", name, remedy, extra={"fields": fields})
