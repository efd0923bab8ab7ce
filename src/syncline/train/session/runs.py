"""The runs of a session: every strategy at every world size, checked before the first one starts."""

from dataclasses import replace

from syncline.errors import UsageError
from syncline.pipeline.freeze.policies import needs_of
from syncline.pipeline.freeze.state import parse as parse_freeze
from syncline.spec import parse_one
from syncline.train.checkpoint.start import find_start
from syncline.train.config import MOST_RANKS, Config, Train, check
from syncline.train.rank.worker import RunSpec
from syncline.train.session.link_changes import parse_changes
from syncline.train.strategies import load


def list_runs(config: Config, *, world_size: int, fixed: bool = False, resumed: bool = False) -> list[RunSpec]:
    """Every run of the session; a setting that cannot work is a `UsageError`. `resumed`: it continues an earlier run.

    If the world size is `fixed` (by a launcher), aggregators are some of its ranks; otherwise they are added to it.
    """
    check(config)
    parse_changes(config)
    if config.train.start and not resumed:
        config = replace(config, train=replace(config.train, start=str(find_start(config.train.start))))
    if not config.compare.strategies:
        raise UsageError("no strategy was named: for example --strategies single,all-reduce,ddp")
    sizes = config.compare.scale or (world_size,)
    runs = [_run_spec(config, name, size, fixed=fixed) for name in config.compare.strategies for size in sizes]
    return list(dict.fromkeys(runs))


def local_world_size(config: Config) -> int:
    """The number of worker ranks on this machine."""
    nodes, nproc = config.cluster.nodes, config.cluster.nproc or config.cluster.nodes or 4
    if nodes and nproc % nodes:
        raise UsageError(
            f"{nproc} ranks do not divide over {nodes} nodes: use --nproc {max(1, nproc // nodes) * nodes}"
        )
    return nproc


def _run_spec(config: Config, name: str, size: int, *, fixed: bool) -> RunSpec:
    strategy, train = load(name), config.train
    if config.compare.scale and config.compare.scale_batch:
        smallest = min(config.compare.scale)
        growth, rest = divmod(size, smallest)
        if rest:
            raise UsageError(
                f"with scale_batch every world size must be a multiple of the smallest: {size} is not of {smallest}"
            )
        train = replace(train, batch=train.batch * growth, steps=-(-train.steps // growth))
    workers = 1 if strategy.alone else size - strategy.servers if fixed else size
    if train.freeze:
        parse_freeze(train.freeze)
        if not strategy.freezes:
            raise UsageError(
                f"'{name}' cannot freeze blocks while it trains: use 'syncline(...)' or 'single', or no --freeze"
            )
    if train.pipe != 1 or train.cache:
        _check_pipeline(name, train, workers)
    elif train.dp:
        raise UsageError("--dp makes fewer stages while blocks freeze, and there are none: use --pipe 2 or more, or 0")
    if workers < 1:
        raise UsageError(f"'{name}' needs workers besides its {strategy.servers} aggregators: start more ranks")
    if not fixed and strategy.servers > MOST_RANKS - workers:
        raise UsageError(f"'{name}' with {workers} workers: use 1 to {MOST_RANKS - workers} servers")
    if not strategy.alone and size == 1 and not config.compare.scale:
        raise UsageError(f"'{name}' synchronises at least two ranks: use --nproc 2 or more, or the strategy 'single'")
    if train.batch % workers:
        below = train.batch // workers * workers or workers
        raise UsageError(f"a batch of {train.batch} does not divide over {workers} workers: use --batch {below}")
    # One rank has nobody to synchronise with: at world size 1 every strategy is plain training.
    return RunSpec(name, workers, strategy.servers if size > 1 else 0, train)


def _check_pipeline(name: str, train: Train, workers: int) -> None:
    if not load(name).pipelines:
        raise UsageError(f"'{name}' has no pipeline: use 'syncline(...)' with --pipe and --cache")
    if train.freeze:
        settings = parse_freeze(train.freeze)
        if settings.every:
            raise UsageError(
                "a pipeline changes its shape after epochs: leave every out of --freeze, --steps is an epoch"
            )
        if train.pipe != 1 and "changes" in needs_of(parse_one(settings.policy).name):
            raise UsageError(f"'{settings.policy}' runs the whole model on every rank: use another policy with --pipe")
    if workers % (train.pipe or 1):
        fix = f"use --nproc {train.pipe}, or a multiple"
        raise UsageError(f"{workers} ranks do not divide into pipelines of {train.pipe} stages: {fix}")
