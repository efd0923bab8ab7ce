"""What a run's trace says beside its spans: who ran where, what steps took of the processor, what was predicted."""

import pytest
from test_changes import Silent

from syncline.cluster.capabilities import capabilities
from syncline.trace.formats.load import load
from syncline.train.config import Config
from syncline.train.session.local import run_local


@pytest.mark.namespaces
def test_a_runs_trace_has_its_ranks_facts(tmp_path):
    able = capabilities()
    if not (able.can_namespaces and able.can_shape):
        pytest.skip(able.why)
    config = Config().override(
        {
            "train.model": "mlp(hidden=16)",
            "train.batch": 8,
            "train.steps": 10,
            "train.test_samples": 0,
            "train.device": "cpu",
            "cluster.nodes": 2,
            "cluster.bandwidth": "500Mbit",
            "compare.strategies": ["syncline(auto, tune=full)"],
        }
    )
    folder, _ = run_local(config, out=tmp_path / "run", watcher=Silent())
    told = load(folder).metadata
    assert told["bandwidth"] == 500_000_000
    assert set(told["hosts"]) == {"0", "1"}
    assert len(set(told["hosts"].values())) == 1  # namespaces of one machine
    assert min(told["cores"].values()) >= 1
    for rank in ("0", "1"):
        assert [row[0] for row in told["usage"][rank]] == list(range(10))
    assert told["recorder"]["dropped"] == 0
    assert 0 < told["recorder"]["overhead_ns_per_step"] < 5e6
    assert told["prediction_ms"] > 0
