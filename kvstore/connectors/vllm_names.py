"""What vLLM's own configuration says about its KV: the namespace, the shards, and how the engine's blocks make up ours."""

from __future__ import annotations

import math
import platform
import re
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvstore.config import StorageUrl
from kvstore.connectors.base import rope_text
from kvstore.connectors.revisions import model_name
from kvstore.connectors.weights import weights_digest
from kvstore.errors import Invalid, Unsupported
from kvstore.ids import MAX_BLOCK_TOKENS, Group, Namespace, Shard, canonical_json

BLOCK_TOKENS: Final = 256
_DTYPES: Final = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.uint8": "U8",
}
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`, as a user writes it.

    Attributes:
        url: A storage URL.
        save: `all`, or only what belongs to `sessions`.
        min_tokens: Prompts with fewer are not saved.
        decode: Whether blocks that decoding fills are saved, or those of prompts only.
        block_tokens: Tokens of a stored block; 0: 256, or the engine's block size where that is larger.
        revision: What identifies the weights, where neither a revision nor their files do.
    """

    url: str
    save: Literal["all", "sessions"] = "all"
    min_tokens: int = 0
    decode: bool = True
    block_tokens: int = 0
    revision: str = ""

    @classmethod
    def parse(cls, extra: Any) -> Settings:
        """Read it.

        Raises:
            Invalid: Something is not as it should be; the message names it.
        """
        try:
            return msgspec.convert(dict(extra or {}), cls)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            known = ", ".join(cls.__struct_fields__)
            raise Invalid(f"kv_connector_extra_config: {error} (it takes {known})") from None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's KV is named and laid out.

    Attributes:
        namespace: Of all of it.
        page_tokens: Tokens of a block of the engine, for each group.
        pages: Blocks of the engine in one of ours, for each group.
        layer_names: Of each group, in the order in which they are stored, as far as this process has them.
        ranks: Tensor-parallel ranks that hold different KV.
        stages: Pipeline stages.
    """

    namespace: Namespace
    page_tokens: tuple[int, ...]
    pages: tuple[int, ...]
    layer_names: tuple[tuple[str, ...], ...]
    ranks: int
    stages: int

    @property
    def groups(self) -> range:
        """Indices of the attention groups."""
        return range(len(self.page_tokens))

    @property
    def shards(self) -> list[Shard]:
        """All of them: a prefix can be used when every one has it."""
        return [
            Shard(rank=rank, ranks=self.ranks, stage=stage, stages=self.stages, group=group)
            for rank in range(self.ranks)
            for stage in range(self.stages)
            for group in self.groups
        ]


class Place(msgspec.Struct, frozen=True):
    """Which worker this is: its tensor-parallel rank of `of`, and its pipeline stage."""

    rank: int = 0
    of: int = 1
    stage: int = 0

    @classmethod
    def of_worker(cls, parallel: Any) -> Place:
        """From `vllm_config.parallel_config` of that worker: ranks run through tensor parallelism first."""
        size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        return cls(parallel.rank % size, size, parallel.rank // size % stages)

    def shard(self, model: Model, group: int) -> Shard:
        """What of each block this worker holds."""
        return Shard(rank=self.rank * model.ranks // self.of, ranks=model.ranks, stage=self.stage, stages=model.stages, group=group)

    def saves(self, model: Model) -> bool:
        """Whether this worker is the one of those with the same KV that saves it."""
        return self.rank % (self.of // model.ranks) == 0


def model_of(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Model:
    """Read the engine's configuration, which is the same in every process of it.

    Raises:
        Unsupported: The engine keeps KV that this connector cannot hold: the message says what, and what to do.
        Invalid: A setting does not fit the engine.
    """
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    _refuse(vllm_config, kv_cache_config)
    groups = list(kv_cache_config.kv_cache_groups)
    specs = [group.kv_cache_spec for group in groups]
    for spec in specs:
        _check_spec(spec)
    page_tokens = tuple(spec.block_size for spec in specs)
    block_tokens = _block_tokens(settings, page_tokens)
    layers, names, kinds = _layers(config, parallel, groups)
    spec = specs[0]
    mla = _is_mla(spec)
    ranks = 1 if mla else math.gcd(parallel.tensor_parallel_size, config.get_total_num_kv_heads())
    if not mla and max(1, config.get_total_num_kv_heads() // parallel.tensor_parallel_size) != spec.num_kv_heads:
        raise Unsupported(
            f"{config.get_total_num_kv_heads()} KV heads do not divide over {parallel.tensor_parallel_size} ranks",
            remedy="use a tensor_parallel_size that divides the KV heads, or a multiple of their number",
        )
    if len({_shape(each) for each in specs}) != 1:
        raise Unsupported("the attention groups of this model have KV of different shapes", remedy="remove the connector")
    shape: dict[str, Any]
    if _on_cpu(vllm_config):
        opaque = f"vllm-{_vllm_version()}/cpu-{_isa(vllm_config, spec)}/bs{spec.block_size}"
        shape = {"page_bytes": spec.page_size_bytes * (block_tokens // spec.block_size), "layout": opaque}
    elif mla:
        rope = int(getattr(config.hf_text_config, "qk_rope_head_dim", 0))
        shape = {"mla_rank": spec.head_size - rope, "mla_rope": rope}
    else:
        shape = {"kv_heads": config.get_total_num_kv_heads(), "head_dim": spec.head_size}
    namespace = Namespace(
        model=model_name(str(config.model)),
        revision=_revision(vllm_config, settings),
        layers=layers,
        rope=rope_text(config.hf_text_config.to_dict()),
        quantization=_quantization(vllm_config, spec),
        dtype=_DTYPES[str(spec.dtype)],
        block_tokens=block_tokens,
        tenant=StorageUrl.parse(settings.url).tenant or "default",
        groups=kinds,
        **shape,
    )
    return Model(
        namespace=namespace,
        page_tokens=page_tokens,
        pages=tuple(block_tokens // size for size in page_tokens),
        layer_names=names,
        ranks=ranks,
        stages=parallel.pipeline_parallel_size,
    )


def _refuse(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if not vllm_config.cache_config.enable_prefix_caching:
        raise Unsupported(
            "prefix caching is off, so the engine cannot use what was computed before", remedy="--enable-prefix-caching"
        )
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, field, 1) > 1:
            raise Unsupported(f"{field} splits the tokens of a block over ranks", remedy=f"leave {field} at 1")
    if speculative is not None and getattr(speculative, "method", "") not in {"ngram", "suffix"}:
        raise Unsupported("the drafting model has KV of its own", remedy="speculate with method 'ngram' or 'suffix', or not at all")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise Unsupported("KV scales found while running differ from engine to engine", remedy="do not set calculate_kv_scales")
    if not kv_cache_config.kv_cache_groups:
        raise Unsupported("this model keeps no KV", remedy="remove the connector")
    for group in kv_cache_config.kv_cache_groups:
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise Unsupported("an attention group of this model cannot be transferred", remedy="remove the connector")


def _check_spec(spec: Any) -> None:
    """Only KV whose bytes are the tokens' alone, at places that follow from the block's number."""
    name = type(spec).__name__
    if name not in {"FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"}:
        raise Unsupported(f"KV of kind {name} is not held yet", remedy="remove the connector for this model")
    if str(spec.dtype) not in _DTYPES:
        raise Unsupported(f"KV of dtype {spec.dtype} is not held", remedy="choose another --kv-cache-dtype")
    mode = getattr(spec, "kv_quant_mode", None)
    plain = mode is None or mode.name in {"NONE", "FP8_PER_TENSOR"}
    packed = getattr(spec, "state_content_bytes", None) is not None or getattr(spec, "num_head_slots", None) is not None
    if not plain or packed or getattr(spec, "tokens_per_state", 1) != 1:
        raise Unsupported("KV with scales or states packed into it is not held yet", remedy="use --kv-cache-dtype auto or fp8")
    if not _is_mla(spec) and spec.head_size_v != spec.head_size:
        raise Unsupported("keys and values of different lengths are not held yet", remedy="remove the connector for this model")


def _is_mla(spec: Any) -> bool:
    return type(spec).__name__ == "MLAAttentionSpec"


def _shape(spec: Any) -> tuple[Any, ...]:
    return spec.num_kv_heads, spec.head_size, str(spec.dtype), spec.block_size, _is_mla(spec)


def _block_tokens(settings: Settings, page_tokens: tuple[int, ...]) -> int:
    page = math.lcm(*page_tokens)
    wanted = settings.block_tokens or max(BLOCK_TOKENS, page)
    if wanted % page or not page <= wanted <= MAX_BLOCK_TOKENS:
        fitting = max(page, min(round(wanted / page) * page, MAX_BLOCK_TOKENS // page * page))
        raise Invalid(
            f"blocks of {wanted} tokens are not made of whole blocks of the engine, which have {page}: "
            f'set "block_tokens": {fitting} in kv_connector_extra_config, or another --block-size'
        )
    return wanted


def _layers(config: Any, parallel: Any, groups: list[Any]) -> tuple[int, tuple[tuple[str, ...], ...], tuple[Group, ...]]:
    """How many layers have KV, their names by group, and the groups."""
    numbers = {name: _number(name) for group in groups for name in group.layer_names}
    names = tuple(tuple(sorted(group.layer_names, key=numbers.__getitem__)) for group in groups)
    if parallel.pipeline_parallel_size > 1:  # a process knows its own stage only
        if len(groups) > 1:
            raise Unsupported("a model with several kinds of attention in pipeline stages", remedy="--pipeline-parallel-size 1")
        layers = config.hf_text_config.num_hidden_layers
        if layers % parallel.pipeline_parallel_size:
            raise Unsupported(f"{layers} layers do not divide over the stages", remedy="choose another --pipeline-parallel-size")
        return layers, names, (_group(groups[0].kv_cache_spec, ()),)
    if len(set(numbers.values())) != len(numbers):
        raise Unsupported("two caches of one layer", remedy="remove the connector for this model")
    place = {name: index for index, name in enumerate(sorted(numbers, key=numbers.__getitem__))}
    if len(groups) == 1:
        return len(place), names, (_group(groups[0].kv_cache_spec, ()),)
    kinds = tuple(
        _group(group.kv_cache_spec, tuple(place[name] for name in each)) for group, each in zip(groups, names, strict=True)
    )
    return len(place), names, kinds


def _number(layer: str) -> int:
    numbers = _NUMBER.findall(layer)
    if len(numbers) != 1:
        raise Unsupported(f"which layer is {layer!r}?", remedy="remove the connector for this model")
    return int(numbers[0])


def _group(spec: Any, layers: tuple[int, ...]) -> Group:
    if type(spec).__name__ == "SlidingWindowSpec":
        return Group(kind="window", window=spec.sliding_window, layers=layers)
    return Group(layers=layers)


def _revision(vllm_config: Any, settings: Settings) -> str:
    """What identifies the weights: what the user says, a digest of the files, or the commit they were downloaded from."""
    config = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    extra = f".{load_format}.{config.seed}" if load_format == "dummy" else ""
    if settings.revision:
        return settings.revision + extra
    path = Path(str(config.model))
    if path.exists():
        try:
            return weights_digest(path) + extra
        except (OSError, ValueError) as error:
            raise Invalid(f'what are the weights in {path}? {error}: set "revision" in kv_connector_extra_config') from None
    for commit in (getattr(config.hf_config, "_commit_hash", None), config.revision):
        if isinstance(commit, str) and _COMMIT.fullmatch(commit):
            return commit + extra
    raise Invalid(
        f"which weights does {config.model} stand for? They may change under that name: give --revision a commit, "
        'or set "revision" in kv_connector_extra_config'
    )


def _quantization(vllm_config: Any, spec: Any) -> str:
    """Of weights and KV: what the numbers in the KV depend on beside weights and dtype."""
    config = vllm_config.model_config
    said = {
        "weights": config.quantization,
        "compute": None if _DTYPES.get(str(config.dtype)) == _DTYPES[str(spec.dtype)] else str(config.dtype),
        "kv": None if str(vllm_config.cache_config.cache_dtype) == "auto" else str(vllm_config.cache_config.cache_dtype),
    }
    told = {key: str(value) for key, value in said.items() if value}
    return canonical_json(told) if told else "none"


def _on_cpu(vllm_config: Any) -> bool:
    return str(vllm_config.device_config.device_type) == "cpu"


def _isa(vllm_config: Any, spec: Any) -> str:
    """By which instructions the CPU backend attends: they decide about the order of the bytes inside a block."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415  an extra, or the engine's own

        return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype))
    except (ImportError, AttributeError, TypeError):  # another version of vLLM: no engine of another kind shares its blocks
        return f"{platform.machine()}-{platform.node()}"


def _vllm_version() -> str:
    try:
        from importlib.metadata import version  # noqa: PLC0415  once, beside vLLM

        import vllm  # noqa: PLC0415  an extra, or the engine's own
    except ImportError:
        return "unknown"
    text = str(getattr(vllm, "__version__", "")) or version("vllm")
    return ".".join(re.split(r"[.+]", text)[:2])
