"""The settings of a session: three small tables, read from a TOML recipe, `--set a.b=c` and the CLI's options."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

from syncline.cluster.quantities import parse_bytes
from syncline.errors import UsageError, short, unknown
from syncline.files import parse_toml, read_json, read_text, real_path, reason
from syncline.spec import split

CHECKPOINTS = "checkpoints"
"""The name of the folder of checkpoints in a run folder."""
FIXED_SETTINGS = ("model", "data", "seed", "batch", "optimizer", "steps", "freeze")
"""Settings of `train` that a resumed run cannot change."""
MOST_RANKS = 1024
"""The most ranks that one machine starts."""
MOST_THREADS = 1024
"""The most compute threads of a process."""
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Train:
    """Settings of the training."""

    model: str = "vgg11"
    data: str = "auto"
    batch: int = 256
    """Samples per step over all ranks; each rank takes an equal share."""
    steps: int = 0
    """Steps per epoch; 0 is the whole data set."""
    epochs: int = 1
    seed: int = 0
    optimizer: str = ""
    """A spec such as `sgd(lr=0.1, momentum=0.9)`; empty for the model's default."""
    test_samples: int = 1000
    """Samples of the test set that every rank evaluates after each epoch; 0 switches it off."""
    device: str = "auto"
    threads: int = 0
    """Compute threads per rank; 0 divides the cores over the ranks."""
    timeout_s: float = 300.0
    """Timeout of a collective, after which the run fails."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes none."""
    start: str = ""
    """A run folder or checkpoint whose parameters the model starts with, where names and shapes agree (fine-tuning)."""
    freeze: str = ""
    """A freeze policy such as `schedule(alpha=0.3)`: after each epoch more of the first blocks stop training."""
    pipe: int = 1
    """Stages of a pipeline that the model is cut into at the start; 1 is no pipeline, 0 what the first steps choose."""
    dp: bool = False
    """As blocks freeze, use fewer stages and more replicas, where that pays."""
    cache: str = ""
    """Memory per node for the activations of frozen blocks, such as `1GB`; empty: they are computed in every epoch."""
    cache_disk: str = ""
    """Bytes per node on disk for what the memory has no room for; empty: none."""
    cache_gpu: str = ""
    """Bytes on each GPU for the same activations, before those in memory; empty: none."""
    log_every: int = 0
    """Steps between the log lines that every rank prints; 0 prints none."""


@dataclass(frozen=True)
class Cluster:
    """Settings of ranks, nodes and links."""

    nproc: int = 0
    """Ranks, all on this machine; 0 is one per node."""
    nodes: int = 0
    """Emulated nodes; 0 runs plain local ranks."""
    bandwidth: str = ""
    latency: str = ""
    loss: float = 0.0
    memory: str = ""
    """Memory that all ranks together may use, such as `8GB`; empty: what is free. A run that needs more is refused."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Bandwidth of the links from a step of each run on, such as `{"20": "100Mbit"}`; "" is no limit."""


@dataclass(frozen=True)
class Compare:
    """Settings of the comparison."""

    strategies: tuple[str, ...] = ("single", "gather-scatter", "all-reduce", "ddp")
    scale: tuple[int, ...] = ()
    """World sizes; each strategy runs at each of them."""
    scale_batch: bool = False
    """The batch grows with the world size and an epoch keeps its samples (Horovod's convention)."""


@dataclass(frozen=True)
class Config:
    """All settings of a session."""

    title: str = ""
    train: Train = field(default_factory=Train)
    cluster: Cluster = field(default_factory=Cluster)
    compare: Compare = field(default_factory=Compare)

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def override(self, values: Mapping[str, Any]) -> "Config":
        """A copy with dotted keys replaced, `{"train.batch": 64}`; unknown keys and wrong types are errors."""
        config = self
        for key, value in values.items():
            config = _set(config, key.split("."), value, key)
        return config


def recipes() -> list[str]:
    """The names of the recipes that ship with the package."""
    folder = resources.files("syncline.train") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str) -> Config:
    """A recipe by name, or from a TOML file."""
    if name in recipes():
        text = (resources.files("syncline.train") / "recipes" / f"{name}.toml").read_text()
    elif name.endswith(".toml"):
        try:
            text = read_text(name)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the recipe {name}: {reason(error)}") from None
    else:
        raise UsageError(f"{unknown('recipe', name, recipes())}; a recipe of your own is a path that ends in .toml")
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"recipe {name} is not valid TOML: {reason(error)}") from None
    return _from_table(table, f"recipe {name}")


def load_run(folder: Path) -> Config:
    """The settings of an earlier run, from its folder."""
    file = folder / "config.json"
    try:
        table = read_json(file)
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a run folder (it has no config.json): name the folder of a run") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {reason(error)}") from None
    except ValueError as error:
        raise UsageError(f"cannot read {file}: it is not JSON ({reason(error)})") from None
    if not isinstance(table, dict):
        raise UsageError(f"cannot read {file}: it is not a table of settings")
    return _from_table(table, str(file))


def run_of(path: Path) -> Path:
    """The run folder of `path`, which is the run folder itself or one of its checkpoints."""
    path = real_path(path)
    return path.parent.parent if path.parent.name == CHECKPOINTS else path


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`["train.batch=64"]` as a dict; values are TOML, or else strings."""
    result = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set takes key=value, for example --set train.batch=64, not {short(setting)}")
        try:
            table = parse_toml(f"value = {text}")
        except ValueError:
            table = {}
        result[key.strip()] = table["value"] if table.keys() == {"value"} else text.strip()
    return result


def check(config: Config) -> None:
    """Raise a `UsageError` for a number that no run can have, whatever the strategy and the model."""
    train, cluster = config.train, config.cluster
    for key in ("batch", "epochs", "steps", "test_samples", "checkpoint_every", "log_every"):
        least = 1 if key in ("batch", "epochs") else 0
        name = "train.test_samples" if key == "test_samples" else f"--{key.replace('_', '-')}"
        _check_range(name, getattr(train, key), least=least, most=2**31 - 1)
    _check_range("train.threads", train.threads, least=0, most=MOST_THREADS)
    _check_range("--seed", train.seed, least=0, most=2**31 - 1)
    for key in ("nproc", "nodes"):
        _check_range(f"--{key}", getattr(cluster, key), least=0, most=MOST_RANKS)
    for size in config.compare.scale:
        _check_range("a world size", size, least=1, most=MOST_RANKS)
    for memory in (cluster.memory, train.cache, train.cache_disk, train.cache_gpu):
        if memory:
            parse_bytes(memory)
    _check_range("--pipe", train.pipe, least=0, most=MOST_RANKS)
    if not 0 < train.timeout_s < 1e7:
        raise UsageError(f"train.timeout_s must be a positive number of seconds, below 1e7, not {train.timeout_s}")


def _check_range(name: str, value: int, *, least: int, most: int) -> None:
    if not least <= value <= most:
        limit = f"{least} or more" if value < least else f"at most {most}"
        raise UsageError(f"{name} must be {limit}, not {short(value)}")


def _from_table(table: Mapping[str, Any], source: str) -> Config:
    try:
        return Config().override(dict(_dotted(table)))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _dotted(table: Mapping[str, Any], prefix: str = "", levels: int = 3) -> Iterable[tuple[str, Any]]:
    """Pairs of a dotted key and its value; a table below `cluster.changes.STEP` is a value."""
    for key, value in table.items():
        if isinstance(value, dict) and value and levels > 1:
            yield from _dotted(value, f"{prefix}{key}.", levels - 1)
        else:
            yield f"{prefix}{key}", value


def _set(node: Any, path: list[str], value: Any, full: str) -> Any:
    (name, *rest), kinds = path, {f.name: f.type for f in fields(node)}
    current: Any = getattr(node, name) if name in kinds else None
    if is_dataclass(current):
        if not rest:
            raise UsageError(f"'{full}' is a table: set one of its keys, such as {full}.{fields(current)[0].name}")
        return replace(node, **{name: _set(current, rest, value, full)})
    if name not in kinds or len(rest) > isinstance(current, Mapping):
        raise unknown("setting", full, [key for key, _ in _dotted(Config().as_dict())])
    if rest:
        value = {**current, rest[0]: value}
    return replace(node, **{name: _convert(kinds[name], value, full)})


def _convert(kind: Any, value: Any, key: str) -> Any:
    if get_origin(kind) is tuple:
        items = split(value) if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(get_args(kind)[0], item, key) for item in items)
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            raise UsageError(f'{key} takes a table, such as {{20 = "100Mbit"}}, not {short(value)}')
        return {name: _convert(get_args(kind)[1], item, key) for name, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is int and isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]{1,18}\s*", value):
        return int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{key} takes {_WORDS[kind]}, not {short(value)}")
    return value
