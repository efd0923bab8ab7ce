"""The budget of tuning: the cost of measurements and a search, against the most that another plan can gain.

The estimate only has to be of the right size. It is made of numbers that all ranks share, so all decide alike.
"""

PAYBACK_STEPS = 10
"""Tuning starts at once if its cost is repaid within this many steps, at best."""
REPAID = 0.25
"""Otherwise it waits until its cost is less than this share of what the gain would have saved so far: a job that has
trained for some time will go on, but the gain is only the most that can be hoped for."""
SHARE = 0.02
"""Or until its cost is less than this share of the time that the job has trained."""
_PROBE_S = {"cpu": 0.4, "cuda": 0.1}
_PROBE_CODEC_S = {"cpu": 0.2, "cuda": 0.05}
"""By device: probes of the network, and of each codec."""
_ERROR_S = {"cpu": 2e-3, "cuda": 3e-3}
_ERROR_VALUE_S = {"cpu": 4e-8, "cuda": 1e-9}
"""By device: the error of a codec, for each tensor and for each value."""
_SEARCH_S, _SEARCH_TENSOR_S = 0.4, 0.0025
"""The search on rank 0: for the launch order, and for each tensor and codec to choose from."""


def expected_seconds(*, device: str, tensors: int, codecs: int, choose: bool, values: int = 0, world: int = 1) -> float:
    """Seconds to measure the job with this many codecs and to search; `choose`: for codecs and units, too.

    `values`: of all gradients, on which the ranks measure errors, each on its share.
    """
    search = _SEARCH_S + (_SEARCH_TENSOR_S * tensors * codecs if choose else 0.0)
    errors = (_ERROR_S[device] * tensors + _ERROR_VALUE_S[device] * values) * codecs / world if choose else 0.0
    return _PROBE_S[device] + _PROBE_CODEC_S[device] * codecs + search + errors


def pays_after(cost: float, *, gain: float, step: float) -> float:
    """Seconds of training after which to spend `cost` seconds, to save at most `gain` of the `step` seconds."""
    if cost <= PAYBACK_STEPS * gain:
        return 0.0
    return cost / max(REPAID * gain / step, SHARE)
