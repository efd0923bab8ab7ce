"""The budget of tuning: the cost of measurements and a search, against the most that another plan can gain.

The estimate only has to be of the right size. It is made of numbers that all ranks share, so all decide alike.
"""

PAYBACK_STEPS = 10
"""Tuning starts at once if its cost is repaid within this many steps, at best."""
SHARE = 0.02
"""Otherwise it waits until its cost is less than this share of the time that the job has trained."""
_PROBE_S = {"cpu": 0.4, "cuda": 0.1}
_PROBE_CODEC_S = {"cpu": 0.2, "cuda": 0.05}
"""By device: probes of the network, and of each codec."""
_SEARCH_S, _SEARCH_TENSOR_S = 0.4, 0.0025
"""The search on rank 0: for the launch order, and for each tensor and codec to choose from."""


def expected_seconds(*, device: str, tensors: int, codecs: int, choose: bool) -> float:
    """Seconds to measure the job with this many codecs and to search; `choose`: for codecs and units, too."""
    search = _SEARCH_S + (_SEARCH_TENSOR_S * tensors * codecs if choose else 0.0)
    return _PROBE_S[device] + _PROBE_CODEC_S[device] * codecs + search


def pays(cost: float, *, gain: float, trained: float) -> bool:
    """Whether to spend `cost` seconds now, for at most `gain` seconds per step, after `trained` seconds of training."""
    return cost <= max(PAYBACK_STEPS * gain, SHARE * trained)
