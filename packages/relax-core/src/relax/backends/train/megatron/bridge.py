"""Families that the backend does not map itself, through megatron-bridge where it is installed.

megatron-bridge knows the TransformerConfig of a model and moves its weights both ways, a tensor at a time;
the schedules, the optimizer, checkpoints and losses are this backend's as for every family. Two things
differ. A tensor comes out of it whole, on every rank: so a rank publishes and writes whole tensors, each of
them one rank's, and holds its share of them while it does. And without Transformer Engine, positions and
attention are this backend's own: a model that needs more than rotary positions and causal softmax attention
is refused.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dcs
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from safetensors.torch import save_file
from torch import Tensor, distributed

from relax.backends.model_files import ModelFolderError
from relax.backends.models import build_model, has_weights, load_config, text_config
from relax.backends.train.errors import ExportError, SettingsError, UntrainableModelError
from relax.backends.train.export import export_folder
from relax.backends.train.megatron import build, export
from relax.backends.train.megatron.families import FAMILIES, Family
from relax.backends.train.megatron.files import FILE_BYTES, describe, file_names, files_of
from relax.backends.train.megatron.padding_token import keep_untrained
from relax.backends.train.megatron.rank import MegatronRank
from relax.backends.train.megatron.rotary import PackedRotary, inverse_frequencies
from relax.backends.train.ranks import RankSpec
from relax.backends.train.safetensors_folder import SafetensorsFolder
from relax.config.megatron import MegatronSettings

_PLAIN: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "normalization": ("RMSNorm",),
    "layernorm_zero_centered_gamma": (False,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
    "qk_l2_norm": (False,),
}
"""What this backend's own attention, norms and positions can do of what a provider may ask for."""

_UNFUSED = (
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
)


def megatron_rank(spec: RankSpec, *, critic: bool = False) -> MegatronRank:
    """One rank of a model of any family: what is registered as `megatron`. See `MegatronRank`.

    Raises:
        UntrainableModelError: also where megatron-bridge would be needed, and is not installed.
    """
    try:
        config = load_config(spec.folder)
    except ModelFolderError as error:
        raise UntrainableModelError(str(error)) from error
    kind = MegatronRank if text_config(config).model_type in FAMILIES else BridgedRank
    return kind(spec, critic=critic)


def auto_bridge(config: Any) -> Any:
    """megatron-bridge's AutoBridge for a Hugging Face config.

    Raises:
        UntrainableModelError: it is not installed, cannot be imported, or does not know the model.
    """
    kind = config.model_type
    known = ", ".join(sorted(FAMILIES))
    try:
        from megatron.bridge import AutoBridge  # type: ignore[import-not-found]  # optional
    except ImportError as error:
        raise UntrainableModelError(
            f"model type {kind!r} is none that the megatron backend maps itself ({known}), and "
            f"megatron-bridge, which maps others, cannot be imported: {error}. Install megatron-bridge "
            "(which needs Transformer Engine), or use actor.backend=torch_native"
        ) from error
    try:
        return AutoBridge.from_hf_config(config)
    except ValueError as error:
        raise UntrainableModelError(
            f"model type {kind!r} is mapped neither by the megatron backend ({known}) nor by the installed "
            f"megatron-bridge: {str(error).strip().splitlines()[0]}; use actor.backend=torch_native"
        ) from error


class BridgedRank(MegatronRank):
    """A rank of a model that megatron-bridge maps. `layout`, `tensors` and `export` are collectives."""

    _maps: Any
    _provider: Any

    def _planned(self, hf: Any, *, whole: Any, **settled: Any) -> build.Blueprint:
        if whole is not hf:
            raise UntrainableModelError(
                f"{self.folder} is a {whole.model_type} with several towers, which the megatron backend does "
                "not train through megatron-bridge; use actor.backend=torch_native"
            )
        if settled["critic"]:
            raise SettingsError(
                f"a critic of a {hf.model_type}: megatron-bridge takes the head for an output layer of the "
                "vocabulary, and has no other name for it; use a model of a family that the megatron backend "
                "maps itself"
            )
        auto = auto_bridge(hf)
        self._maps = auto._model_bridge
        self._provider = auto.to_megatron_provider(load_weights=False)
        return planned(self._provider, hf, **{k: v for k, v in settled.items() if k != "critic"})

    def _built(self, seed: int) -> list[GPTModel]:
        models = chunks(self._plan)
        with tempfile.TemporaryDirectory(prefix="relax-bridge-") as scratch:
            folder = self.folder
            if not has_weights(folder):  # drawn from the seed, whole, as all backends do
                folder = Path(scratch)
                build_model(self.folder, seed=seed).save_pretrained(folder)
            self._source = _source_of(folder, self._plan.hf)
            self._require_mapped(models)
            self._maps.load_weights_hf_to_megatron(self._source, models)
            files = SafetensorsFolder(folder)
            self._rows = {name: files.shape(name)[0] for name in files.names() if files.shape(name)}
            # While the files are there: their order is that of the stream.
            self._shapes = {name: tensor.shape for name, tensor in self._streamed(models)}
        return models

    def _require_mapped(self, models: list[GPTModel]) -> None:
        """See that every parameter has a Hugging Face tensor: those without are only logged, and left."""
        tasks = self._maps.build_conversion_tasks(self._source, models)
        found = {
            (task.vp_stage or 0, task.param_name)
            for task in tasks
            if task is not None and task.megatron_module is not None
        }
        for stage, model in enumerate(models):
            for name, _ in model.named_parameters():
                if (stage, name) not in found and not (self._plan.tied and "output_layer" in name):
                    raise UntrainableModelError(
                        f"megatron-bridge finds no tensor of {self.folder} for {name} of a "
                        f"{self._plan.hf.model_type}"
                    )

    def _freeze(self) -> None:
        if self._plan.freeze:
            raise SettingsError(
                f"actor.freeze = {list(self._plan.freeze)} with a {self._plan.hf.model_type}, which is a "
                "language model alone: nothing would be left to train; leave it out"
            )

    def _streamed(self, models: list[GPTModel]) -> Iterator[tuple[str, Tensor]]:
        """Every Hugging Face tensor, whole, on every rank, one after the other; in a fixed order."""
        for found in self._maps.stream_weights_megatron_to_hf(
            models, self._source, cpu=False, show_progress=False
        ):
            # It leaves the padding of a vocabulary in.
            yield found.param_name, found.weight[: self._rows.get(found.param_name)]

    def _owners(self) -> dict[str, int]:
        """The rank that each tensor is published by: the largest to whom has least."""
        loads = [0] * distributed.get_world_size()
        owners = {}
        for name in sorted(self._shapes, key=lambda name: (-self._shapes[name].numel(), name)):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += self._shapes[name].numel()
        return owners

    def layout(self) -> "dcs.Layout":
        """The tensors that this rank publishes, whole."""
        rank, dtype = distributed.get_rank(), self._plan.config.params_dtype
        return dcs.layout.of(
            {
                name: torch.empty(self._shapes[name], dtype=dtype, device="meta")
                for name, owner in self._owners().items()
                if owner == rank
            }
        )

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors that this rank publishes, gathered from all ranks: copies, a share of the model."""
        rank, owners = distributed.get_rank(), self._owners()
        return [
            (name, tensor.detach().clone())
            for name, tensor in self._streamed(self._models)
            if owners[name] == rank
        ]

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder together, file by file; whole or not at all."""
        folder = Path(folder)
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
        if distributed.get_rank() == 0 and not taken:
            with export_folder(source=self.folder, target=folder) as scratch:
                export.told(str(scratch), self.device)
                files = self._write(scratch)
                describe(scratch, self.folder, files)
                distributed.barrier()  # all files are there
        else:
            place = export.told("", self.device)
            if not place:  # what rank 0 finds is what counts
                raise ExportError(
                    f"export target {folder} is already there and not an empty folder; name a new one"
                )
            self._write(Path(place))
            distributed.barrier()
        distributed.barrier()  # the folder is in its place

    def _write(self, scratch: Path) -> list[list["_Written"]]:
        dtype = self._plan.config.params_dtype
        files = files_of([_Written(name, dtype, shape) for name, shape in self._shapes.items()], FILE_BYTES)
        rank, size = distributed.get_rank(), distributed.get_world_size()
        stream = self._streamed(self._models)
        for index, (file, contents) in enumerate(zip(file_names(len(files)), files, strict=True)):
            kept: dict[str, Tensor] = {}
            for expected in contents:
                name, tensor = next(stream)
                assert name == expected.name, "the order of a stream is fixed"
                if rank == index % size:
                    kept[name] = tensor.detach().to("cpu", copy=True).contiguous()
            if kept:
                save_file(kept, scratch / file, metadata={"format": "pt"})
        for _ in stream:  # it is a collective: every rank reads it to its end
            raise ExportError("megatron-bridge gave a tensor more than before")
        return files


@dataclasses.dataclass(frozen=True)
class _Written:
    name: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def planned(
    provider: Any,
    hf: Any,
    *,
    parallel: Any,
    settings: MegatronSettings,
    dtype: torch.dtype,
    device: torch.device,
    replay: bool,
) -> build.Blueprint:
    """A blueprint whose TransformerConfig is megatron-bridge's provider, with this run's split and precision.

    Raises:
        UntrainableModelError: without Transformer Engine, a model that needs it.
        SettingsError: what Megatron refuses.
    """
    text = hf.to_dict()
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers")
    build.require_divisible({name: text.get(name) for name in names}, parallel)
    engine = build.uses_transformer_engine(settings, device)
    # It only pads what it cuts.
    pads = parallel.tensor_parallel > 1
    multiple = settings.vocabulary_divisor * parallel.tensor_parallel if pads else 1
    if not engine:
        require_plain(provider, hf.model_type)
    wanted: dict[str, Any] = {
        **build.parallel_fields(parallel, settings),
        **build.precision_fields(dtype, device),
        **build.mixture_fields(bool(provider.num_moe_experts), settings, engine, replay),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "parallel_output": True,
        "should_pad_vocab": pads,
        "make_vocab_size_divisible_by": settings.vocabulary_divisor,
        "seq_length": hf.max_position_embeddings,
    }
    if not engine:
        half = provider.kv_channels or hf.hidden_size // hf.num_attention_heads
        wanted |= dict.fromkeys(_UNFUSED, False) | {
            "position_embedding_type": "mrope",
            "mrope_section": [half // 2, 0, 0],
        }
    for name, value in (wanted | dict(settings.transformer_config)).items():
        if not hasattr(provider, name):
            raise SettingsError(f"megatron-bridge's {type(provider).__name__} has no field {name}")
        setattr(provider, name, value)
    plan = build.Blueprint(
        hf=hf,
        family=Family((hf.model_type,), fields=_no_fields, shape=_no_shape),
        config=provider,
        transformer_engine=engine,
        padded_vocabulary=-(-hf.vocab_size // multiple) * multiple,
        tied=bool(provider.share_embeddings_and_output_weights),
        critic=False,
    )
    if not engine:
        provider.transformer_layer_spec = lambda config, vp_stage=None: build.layer_spec(plan, vp_stage)
    try:
        provider.finalize()
    except (AssertionError, ValueError, TypeError) as error:
        raise SettingsError(f"megatron-core refuses this configuration: {error}") from error
    return plan


def require_plain(provider: Any, kind: str) -> None:
    """See that a model needs no more than rotary positions, RMSNorm and causal softmax attention.

    Raises:
        UntrainableModelError: it does.
    """
    from megatron.bridge.models.gpt_provider import GPTModelProvider  # type: ignore[import-not-found]

    for name, allowed in _PLAIN.items():
        value = getattr(provider, name, allowed[0])
        if value not in allowed:
            raise UntrainableModelError(
                f"a {kind} has {name} = {value!r}, which the megatron backend can do with Transformer Engine "
                "on a GPU only; install it, or use actor.backend=torch_native"
            )
    own_spec = provider.transformer_layer_spec is not GPTModelProvider.transformer_layer_spec
    if own_spec or type(provider).provide is not GPTModelProvider.provide:
        raise UntrainableModelError(
            f"a {kind} has layers of its own ({type(provider).__name__}), which the megatron backend can "
            "build with Transformer Engine on a GPU only; install it, or use actor.backend=torch_native"
        )


def chunks(plan: build.Blueprint) -> list[GPTModel]:
    """This rank's parts of the model, one a virtual stage, their weights not yet filled.

    Raises:
        UntrainableModelError: it is no plain GPTModel, whose logits are its output layer's.
    """
    provider: Any = plan.config
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    stages = provider.virtual_pipeline_model_parallel_size or 1
    frequencies = None if plan.transformer_engine else inverse_frequencies(plan.hf)
    built = []
    for stage in range(stages):
        virtual = stage if stages > 1 else None
        first, last = (
            known(ignore_virtual=False, vp_stage=virtual)
            for known in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        )
        model = provider.provide(pre_process=first, post_process=last, vp_stage=virtual)
        if type(model) is not GPTModel or (last and type(model.output_layer) is not ColumnParallelLinear):
            raise UntrainableModelError(
                f"a {plan.hf.model_type} is more than a GPTModel with an output layer; use "
                "actor.backend=torch_native"
            )
        padding = getattr(plan.hf, "pad_token_id", None)
        if first and padding is not None:
            keep_untrained(model.embedding.word_embeddings, padding)
        if frequencies is not None:
            device = next(model.parameters()).device
            setattr(model, "rotary_pos_emb", PackedRotary(frequencies.to(device)))  # noqa: B010
        built.append(model.train())
    return built


def _source_of(folder: Path, hf: Any) -> Any:
    """What megatron-bridge reads tensors from."""
    from megatron.bridge.models.hf_pretrained.causal_lm import (  # type: ignore[import-not-found]
        PreTrainedCausalLM,
    )

    source = PreTrainedCausalLM.from_pretrained(str(folder))
    source.config = hf
    return source


def _no_fields(config: Any) -> dict[str, Any]:
    return {}


def _no_shape(config: Any) -> Any:
    raise UntrainableModelError("the tensors of this family are known to megatron-bridge only")


__all__ = ["BridgedRank", "auto_bridge", "megatron_rank"]
