"""Sampling: temperature, penalties, min-p, top-k, top-p and the draw, without sorting the vocabulary and without waiting for the device.

The draw is defined in integers (kernels/reference.py, kernels/exponential_race.py), so that a row gets the same token on a CPU, on any
GPU and in any batch. Every op takes its per-row parameters from tensors on the device of the logits, reads nothing back and may be
captured in a CUDA graph once it has run (the first call loads what it needs). Ids and rows that lie outside of their tensors cannot be
refused without waiting; kernels skip them.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels import cpu_sampling, reference
from kernels.build import Library, launch, load
from kernels.exponential_race import log_time_table
from kernels.op_library import LIBRARY
from kernels.row_parameters import NUM_COLUMNS

MAX_VOCAB_SIZE = 1 << 22
"""Sums of weights of up to 2^40 stay below 2^62."""
MAX_NUM_TOP = 1024
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_LAUNCHERS = {
    "sample_tokens": (_POINTER, _INT, _LONG, _LONG, _INT, *(_POINTER,) * 3, _INT, _POINTER),
    "greedy_tokens": (_POINTER, _INT, _LONG, _LONG, _INT, _POINTER, _INT, _POINTER),
    "token_logprobs": (_POINTER, _INT, _LONG, _LONG, _INT, *(_POINTER,) * 2, _LONG, _INT, *(_POINTER,) * 5),
    "record_tokens": (_POINTER, _LONG, _LONG, _INT, _POINTER, _POINTER, _LONG, _INT, _POINTER),
    "apply_penalties": (_POINTER, _LONG, _LONG, _INT, _POINTER, _LONG, _LONG, *(_POINTER,) * 3),
    "apply_token_bias": (_POINTER, _LONG, _LONG, _INT, *(_POINTER,) * 3, _LONG, _POINTER),
    "apply_token_mask": (_POINTER, _LONG, _LONG, _INT, *(_POINTER,) * 2, _LONG, _LONG, _POINTER),
}


def libraries() -> list[Library]:
    """What a server may load."""
    return [Library("sampling.cu")]


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = load(libraries()[0])
    for name, argtypes in _LAUNCHERS.items():
        launcher = getattr(loaded, name)
        launcher.argtypes = argtypes
        launcher.restype = ctypes.c_char_p
    return loaded


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(name: str, device: torch.device, *arguments: object) -> None:
    launch(getattr(_library(), name), device, *arguments)


LIBRARY.define("sample_tokens(Tensor logits, Tensor parameters) -> Tensor")
LIBRARY.define("greedy_tokens(Tensor logits) -> Tensor")
LIBRARY.define("token_logprobs(Tensor logits, Tensor rows, Tensor token_ids, int num_top) -> (Tensor, Tensor, Tensor, Tensor)")
LIBRARY.define("record_tokens(Tensor(a!) history, Tensor slots, Tensor token_ids, bool is_prompt) -> ()")
LIBRARY.define("apply_penalties(Tensor(a!) logits, Tensor history, Tensor slots, Tensor penalties) -> ()")
LIBRARY.define("apply_token_bias(Tensor(a!) logits, Tensor rows, Tensor token_ids, Tensor values) -> ()")
LIBRARY.define("apply_token_mask(Tensor(a!) logits, Tensor rows, Tensor masks) -> ()")


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """One token a row after temperature, min-p, top-k and top-p. int64 [num_rows].

    logits: fp32, fp16 or bf16 [num_rows, vocab_size], rows of any stride; parameters: int64 [num_rows, 7], a row of
    `kernels.row_parameters.row_parameters` each, greedy rows among them. A row without a finite logit yields token 0."""
    _check_logits(logits)
    _check_tensor("parameters", parameters, torch.int64, (logits.shape[0], NUM_COLUMNS), logits.device)
    tokens: torch.Tensor = torch.ops.pagewire.sample_tokens(logits, parameters)
    return tokens


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The lowest index of the largest logit of each row; NaN never wins. logits as for `sample_tokens`. int64 [num_rows]."""
    _check_logits(logits)
    tokens: torch.Tensor = torch.ops.pagewire.greedy_tokens(logits)
    return tokens


def token_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-softmax of token_ids[i] in row rows[i]: fp32 logprobs [n], int64 ranks [n] (1 = most likely), and of the num_top most
    likely tokens, ties by index, int64 ids and fp32 logprobs [n, num_top]. rows, token_ids: int64 [n]."""
    _check_logits(logits)
    _check_tensor("rows", rows, torch.int64, (len(rows),), logits.device)
    _check_tensor("token_ids", token_ids, torch.int64, (len(rows),), logits.device)
    if not 0 <= num_top <= min(MAX_NUM_TOP, logits.shape[1]):
        raise ValueError(f"num_top is {num_top}; ask for 0 to {min(MAX_NUM_TOP, logits.shape[1])} tokens")
    logprobs, ranks, top_ids, top_logprobs = torch.ops.pagewire.token_logprobs(logits, rows, token_ids, num_top)
    return logprobs, ranks, top_ids, top_logprobs


def record_tokens(history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, is_prompt: bool) -> None:
    """Note token_ids[i] in slot slots[i], as part of the prompt or as generated once more. history: int32 [num_slots, vocab_size],
    zeroed by the caller when a slot changes hands; slots, token_ids: int64 [n]."""
    if history.dtype != torch.int32 or history.dim() != 2 or history.stride(1) != 1:
        raise ValueError(f"history is {history.dtype} {tuple(history.shape)}; pass int32 [num_slots, vocab_size] with contiguous rows")
    _check_tensor("slots", slots, torch.int64, (len(slots),), history.device)
    _check_tensor("token_ids", token_ids, torch.int64, (len(slots),), history.device)
    torch.ops.pagewire.record_tokens(history, slots, token_ids, is_prompt)


def apply_penalties(logits: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, penalties: torch.Tensor) -> None:
    """Repetition penalty over prompt and output, frequency and presence penalty over the output, in place.

    logits: fp32 [num_rows, vocab_size]; history: see `record_tokens`; slots: int64 [num_rows], -1 for a row without penalties;
    penalties: fp32 [num_rows, 3] = repetition (1 is off), frequency, presence (0 is off)."""
    _check_logits(logits, is_changed=True)
    if history.dtype != torch.int32 or history.dim() != 2 or history.stride(1) != 1 or history.shape[1] != logits.shape[1]:
        raise ValueError(f"history is {history.dtype} {tuple(history.shape)}; pass int32 [num_slots, {logits.shape[1]}], rows contiguous")
    _check_tensor("history", history, torch.int32, tuple(history.shape), logits.device, is_contiguous=False)
    _check_tensor("slots", slots, torch.int64, (logits.shape[0],), logits.device)
    _check_tensor("penalties", penalties, torch.float32, (logits.shape[0], 3), logits.device)
    torch.ops.pagewire.apply_penalties(logits, history, slots, penalties)


def apply_token_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[i], token_ids[i]] += values[i], in place; -infinity forbids a token. Each pair may occur once. rows, token_ids:
    int64 [n]; values: fp32 [n]; logits: fp32."""
    _check_logits(logits, is_changed=True)
    _check_tensor("rows", rows, torch.int64, (len(rows),), logits.device)
    _check_tensor("token_ids", token_ids, torch.int64, (len(rows),), logits.device)
    _check_tensor("values", values, torch.float32, (len(rows),), logits.device)
    torch.ops.pagewire.apply_token_bias(logits, rows, token_ids, values)


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Forbid, in place, every token of row rows[i] whose bit in masks[i] is clear. rows: int64 [n]; masks: int32
    [n, ceil(vocab_size / 32)], token t at bit t % 32 of word t // 32; logits: fp32."""
    _check_logits(logits, is_changed=True)
    _check_tensor("rows", rows, torch.int64, (len(rows),), logits.device)
    _check_tensor("masks", masks, torch.int32, (len(rows), -(-logits.shape[1] // 32)), logits.device)
    torch.ops.pagewire.apply_token_mask(logits, rows, masks)


def _check_logits(logits: torch.Tensor, is_changed: bool = False) -> None:
    if logits.dim() != 2 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(f"logits are {tuple(logits.shape)}, strides {logits.stride()}; pass [num_rows, vocab_size] with contiguous rows")
    if not 1 <= logits.shape[1] <= MAX_VOCAB_SIZE:
        raise ValueError(f"logits have {logits.shape[1]} tokens; 1 to {MAX_VOCAB_SIZE} are supported")
    if logits.dtype not in ((torch.float32,) if is_changed else _DTYPES):
        raise ValueError(f"logits are {logits.dtype}; pass {'float32' if is_changed else 'float32, float16 or bfloat16'}")


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, is_contiguous: bool = True
) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or (is_contiguous and not tensor.is_contiguous()):
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; pass a contiguous {dtype} tensor of shape {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and what it belongs to on {device}; move it there")


def _shape_arguments(matrix: torch.Tensor) -> tuple[int, int, int]:
    """(row stride, number of rows, size of a row)"""
    return matrix.stride(0), matrix.shape[0], matrix.shape[1]


def _sample_tokens_cuda(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if len(tokens):
        pointers = (parameters.data_ptr(), log_time_table(logits.device).data_ptr(), tokens.data_ptr())
        arguments = (logits.data_ptr(), _DTYPES[logits.dtype], *_shape_arguments(logits), *pointers)
        _launch("sample_tokens", logits.device, *arguments, _num_processors(logits.device))
    return tokens


def _greedy_tokens_cuda(logits: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if len(tokens):
        arguments = (logits.data_ptr(), _DTYPES[logits.dtype], *_shape_arguments(logits), tokens.data_ptr())
        _launch("greedy_tokens", logits.device, *arguments, _num_processors(logits.device))
    return tokens


def _token_logprobs_cuda(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs, ranks, top_ids, top_logprobs = _empty_logprobs(logits, rows, token_ids, num_top)
    if len(rows):
        outputs = (logprobs.data_ptr(), ranks.data_ptr(), top_ids.data_ptr(), top_logprobs.data_ptr())
        inputs = (rows.data_ptr(), token_ids.data_ptr(), len(rows), num_top)
        _launch("token_logprobs", logits.device, logits.data_ptr(), _DTYPES[logits.dtype], *_shape_arguments(logits), *inputs, *outputs)
    return logprobs, ranks, top_ids, top_logprobs


def _empty_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    count = rows.shape[0]
    return (
        logits.new_empty(count, dtype=torch.float32),
        logits.new_empty(count, dtype=torch.int64),
        logits.new_empty((count, num_top), dtype=torch.int64),
        logits.new_empty((count, num_top), dtype=torch.float32),
    )


def _record_tokens_cuda(history: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, is_prompt: bool) -> None:
    if len(slots):
        arguments = (slots.data_ptr(), token_ids.data_ptr(), len(slots), is_prompt)
        _launch("record_tokens", history.device, history.data_ptr(), *_shape_arguments(history), *arguments)


def _apply_penalties_cuda(logits: torch.Tensor, history: torch.Tensor, slots: torch.Tensor, penalties: torch.Tensor) -> None:
    if len(logits):
        arguments = (history.data_ptr(), history.stride(0), history.shape[0], slots.data_ptr(), penalties.data_ptr())
        _launch("apply_penalties", logits.device, logits.data_ptr(), *_shape_arguments(logits), *arguments)


def _apply_token_bias_cuda(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    if len(rows):
        arguments = (rows.data_ptr(), token_ids.data_ptr(), values.data_ptr(), len(rows))
        _launch("apply_token_bias", logits.device, logits.data_ptr(), *_shape_arguments(logits), *arguments)


def _apply_token_mask_cuda(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    if len(rows):
        arguments = (rows.data_ptr(), masks.data_ptr(), masks.shape[1], len(rows))
        _launch("apply_token_mask", logits.device, logits.data_ptr(), *_shape_arguments(logits), *arguments)


def _empty_tokens(logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


LIBRARY.impl("sample_tokens", cpu_sampling.sample_tokens, "CPU")
LIBRARY.impl("sample_tokens", _sample_tokens_cuda, "CUDA")
LIBRARY.impl("sample_tokens", _empty_tokens, "Meta")
LIBRARY.impl("greedy_tokens", cpu_sampling.greedy_tokens, "CPU")
LIBRARY.impl("greedy_tokens", _greedy_tokens_cuda, "CUDA")
LIBRARY.impl("greedy_tokens", _empty_tokens, "Meta")
LIBRARY.impl("token_logprobs", cpu_sampling.token_logprobs, "CPU")
LIBRARY.impl("token_logprobs", _token_logprobs_cuda, "CUDA")
LIBRARY.impl("token_logprobs", _empty_logprobs, "Meta")
for _name, _on_cpu, _on_cuda in (
    ("record_tokens", reference.record_tokens, _record_tokens_cuda),
    ("apply_penalties", cpu_sampling.apply_penalties, _apply_penalties_cuda),
    ("apply_token_bias", reference.apply_token_bias, _apply_token_bias_cuda),
    ("apply_token_mask", cpu_sampling.apply_token_mask, _apply_token_mask_cuda),
):
    LIBRARY.impl(_name, _on_cpu, "CPU")
    LIBRARY.impl(_name, _on_cuda, "CUDA")
    LIBRARY.impl(_name, lambda *_: None, "Meta")
