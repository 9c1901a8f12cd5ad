"""Which file builds which family."""

from __future__ import annotations

from collections.abc import Callable

from shared.engine.layers.cpu_layer import in_one_call
from shared.engine.layers.linear import Weights
from shared.engine.models.causal_lm import CausalLM
from shared.engine.models.gemma2 import build_gemma2
from shared.engine.models.gemma3 import build_gemma3
from shared.engine.models.llama import build_llama
from shared.engine.models.mixtral import build_mixtral
from shared.engine.models.phi3 import build_phi3
from shared.engine.models.qwen3 import build_qwen3
from shared.engine.models.qwen3_moe import build_qwen3_moe
from shared.engine.rotary import RotaryTables
from shared.engine.tensor_parallel.sharding import Reduce
from shared.errors import ModelLoadError
from shared.model_files.model_config import Architecture, ModelConfig

BUILDERS: dict[Architecture, Callable[[ModelConfig, Weights, RotaryTables], CausalLM]] = {
    "llama": build_llama,
    # Windows, biases and layers without rotary embedding are facts of the configuration: these have Llama's layers.
    "mistral": build_llama,
    "smollm3": build_llama,
    "qwen2": build_llama,
    "qwen3": build_qwen3,
    "qwen3_moe": build_qwen3_moe,
    "mixtral": build_mixtral,
    "gemma2": build_gemma2,
    "gemma3": build_gemma3,
    "phi3": build_phi3,
}


def build_model(config: ModelConfig, weights: Weights, rotary: RotaryTables, reduce: Reduce | None = None) -> CausalLM:
    """Empties `weights` (Hugging Face's names), so that memory is not held twice. Raises ModelLoadError for a family that has no file.
    `reduce`: what each rank's attention and feed-forward parts give is put together by this."""
    builder = BUILDERS.get(config.architecture)
    if builder is None:
        raise ModelLoadError(f"family {config.architecture!r} is not supported; supported: {', '.join(BUILDERS)}")
    model = builder(config, weights, rotary)
    if reduce is not None:
        model.layers = [layer.summed_over_ranks(reduce) for layer in model.layers]
    else:
        model.layers = [in_one_call(layer) for layer in model.layers]
    assert not weights.names, f"{config.architecture} leaves weights unused: {', '.join(weights.names[:8])}"
    return model
