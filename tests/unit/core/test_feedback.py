"""Predictions against reports: sums, drift, and what is learned of sizes."""

from itertools import repeat

import pytest

from prefixroute.core.feedback import GROW, SHRINK, Feedback, Prediction, capacity_factor

BLOCK = 256


def fed(*reports: tuple[float, float], n: int = 100) -> Feedback:
    """Each (predicted, reported) `n` times in a row."""
    feedback = Feedback(BLOCK)
    feedback.add(0)
    for predicted, reported in reports:
        for _ in repeat(None, n):
            feedback.reported(0, predicted, reported)
    return feedback


@pytest.mark.parametrize(
    ("predicted", "reported", "prediction"),
    [
        (1000, 1000, Prediction.SOUND),
        (1000, 600, Prediction.SOUND),
        (1000, 400, Prediction.OVER),
        (1000, 0, Prediction.OVER),
        (600, 1000, Prediction.SOUND),
        (400, 1000, Prediction.UNDER),
        (0, 1000, Prediction.UNDER),
        (0, 0, Prediction.UNKNOWN),
        (40, 0, Prediction.UNKNOWN),
    ],
)
def test_predictions_hold_within_a_factor_of_two(predicted: float, reported: float, prediction: Prediction) -> None:
    assert fed((predicted, reported)).of(0).prediction is prediction


def test_nothing_is_concluded_from_a_few_reports() -> None:
    assert fed((10_000, 0), n=19).of(0).prediction is Prediction.UNKNOWN
    assert fed((10_000, 0), n=20).of(0).prediction is Prediction.OVER


def test_a_prediction_holds_again_only_when_it_clearly_does() -> None:
    assert fed((1000, 0), (1000, 600), n=300).of(0).prediction is Prediction.OVER
    assert fed((1000, 0), (1000, 800), n=300).of(0).prediction is Prediction.SOUND


def test_an_instance_whose_predictions_have_vanished_is_still_known_to_cache_nothing() -> None:
    feedback = fed((1000, 0), (0, 0), n=1000)
    assert feedback.of(0).prediction is Prediction.OVER


def test_a_change_is_told_once() -> None:
    feedback = fed((1000, 0))
    [(slot, one)] = feedback.take_changed()
    assert (slot, one.prediction, one.recent_ratio) == (0, Prediction.OVER, 0)
    assert feedback.take_changed() == []


def test_a_lost_instance_is_unknown_but_its_sums_stay() -> None:
    feedback = fed((1000, 900))
    feedback.forget(0)
    one = feedback.of(0)
    assert (one.prediction, one.n_reports, one.recent_ratio) == (Prediction.UNKNOWN, 0, None)
    assert (one.predicted_tokens, one.reported_tokens) == (100_000, 90_000)


@pytest.mark.parametrize(
    ("predicted", "reported", "is_full", "factor"),
    [
        (1024, 1024, True, 1.0),
        (1024, 1024 - BLOCK, True, 1.0),
        (4096, 4096 - BLOCK - 1, False, SHRINK),  # all of the prompt: its scale cannot be off
        (0, 4096, False, 1.0),
        (0, 4096, True, GROW),
        (0, BLOCK, True, 1.0),
        (2048, 0, False, SHRINK),
        # Half of the prompt: the scale may be off by a fifth of what a half and a half make.
        (2048, 2048 - BLOCK - 200, False, 1.0),
        (2048, 2048 - BLOCK - 206, False, SHRINK),
        (2048, 2048 + BLOCK + 200, True, 1.0),
        (2048, 2048 + BLOCK + 206, True, GROW),
    ],
)
def test_a_map_is_sized_by_how_it_errs(predicted: float, reported: float, is_full: bool, factor: float) -> None:
    assert capacity_factor(predicted, reported, 4096, BLOCK, is_full=is_full) == factor
