"""The model in an exported folder: its adapter merged, its base named, and the check that it loads and samples."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch
from jinja2 import TemplateError
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_engine.bridges.transport.saving import write_whole
from grpo_engine.errors import CheckpointError, ModelError, first_of
from grpo_engine.models.config import is_from_hub
from grpo_engine.models.loading import load_model, resolve_model
from grpo_engine.models.lora import adapter_tensors
from grpo_engine.models.merged_lora import merged_weights
from grpo_engine.models.stored_weights import checkpoint_folder, download_checkpoint
from grpo_engine.wire.checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CheckpointMarker, open_regular
from grpo_engine.wire.codec import open_file, read_whole, require_written, shortened

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
MAX_GENERATION_CONFIG_BYTES = 1 << 20
NUM_TOKENS = 8
"""Sampled for the check."""
PROMPT = "1 + 1 ="
MAX_PROMPT_CHARS = 4096
"""Of the prompt in the chat template; the time and memory of the check grow with it."""
MAX_ANSWER_CHARS = 1000
"""Shown of what was sampled."""
RENDER_S, RENDER_BYTES = 10, 1 << 30
"""Time and memory that a chat template may take."""
TRIAL_CPU_S, TRIAL_BYTES = 20, 4 << 30
"""What tokenizer and settings of the model may take of CPU and memory before anything is loaded. The tokenizer of the
largest vocabularies takes some seconds; memory is address space, of which each thread reserves 64 MiB."""
SAMPLE_S, SAMPLE_BYTES = 60, 4 << 30
"""Time that sampling may take for each GiB of the model that has begun, and its memory on a CPU beside as much again as
the model: settings that no tensor shows, as the length of a chunk or the number of hashes, multiply both. So it is for
loading, by its files: a pickle of tensors may hold a text that is doubled over and over."""
MAX_INDEX_BYTES = 16 << 20
"""Of the files of weights by their tensors: 100,000 take 10 MB."""
MAX_SPARE_ELEMENTS = 1 << 26
"""Of what a model has beside the stored tensors: frequencies of positions, masks, and those that are missing, which are
named as it is loaded."""

_WRITTEN_SETTINGS = frozenset({
    "r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform", "fan_in_fan_out", "task_type",
    "peft_type", "peft_version", "inference_mode", "base_model_name_or_path",
})  # fmt: skip
"""Those of an adapter that our trainers set; all others have PEFT's defaults."""

log = logging.getLogger(__name__)


def require_adapter(folder: Path) -> None:
    """Refuse settings of an adapter that no trainer of ours writes, which may be somebody else's work: PEFT makes
    matrices of any rank, repeats layers, decomposes weights in any number of passes, and takes names for patterns.

    Raises:
        CheckpointError: the file is damaged, has other settings, or another rank than its tensors.
    """
    path = folder / ADAPTER_CONFIG
    try:
        table = json.loads(read_whole(path))
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            ranks = [file.get_slice(name).get_shape()[0] for name in file.keys() if ".lora_A." in name]  # noqa: SIM118
    except (OSError, ValueError, RecursionError, IndexError, SafetensorError) as error:
        raise CheckpointError(f"{ADAPTER_CONFIG}: damaged: {error}") from None
    targets = table.get("target_modules") if isinstance(table, dict) else None
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise CheckpointError(f"{ADAPTER_CONFIG}: damaged: target_modules is no list of names")
    usual = {name: value for name, value in LoraConfig().to_dict().items() if name not in _WRITTEN_SETTINGS}
    if others := [name for name, value in usual.items() if table.get(name) and table[name] != value]:
        raise CheckpointError(f"{ADAPTER_CONFIG}: {', '.join(others)}: an adapter with these is not exported")
    if len(targets) > len(ranks):
        raise CheckpointError(f"{ADAPTER_CONFIG}: damaged: more target_modules than layers")
    if table.get("peft_type") != "LORA" or any(rank != table.get("r") for rank in ranks):
        raise CheckpointError(f"{ADAPTER_CONFIG}: damaged: no LoRA of the rank that its tensors have")


def name_base(folder: Path, marker: CheckpointMarker) -> None:
    """Name the base model as the run named it: a hub id, or a folder of this machine."""
    path = folder / ADAPTER_CONFIG
    table = json.loads(path.read_text())
    base = resolve_model(marker.model_name)
    path.write_text(json.dumps({**table, "base_model_name_or_path": base}, indent=2) + "\n")
    if Path(base).is_dir():
        log.warning(
            "the base model is a folder of this machine, %s: elsewhere the adapter does not load; use --merge-lora",
            base,
        )


def merge(folder: Path, marker: CheckpointMarker, device: str) -> None:
    """Replace the adapter in a folder by the model with the adapter merged into it.

    The tokenizer stays that of the checkpoint: files beside a base, which may be somebody else's work, may be links.

    Raises:
        CheckpointError: the disk fails.
        ModelError: loading the base takes too long, or too much memory.
    """
    try:
        with _limited_by(_num_bytes(folder, checkpoint_folder(marker.model_name)), device):
            adapted = _load_adapted(folder, marker, device)
    except (MemoryError, RuntimeError, TimeoutError) as error:
        raise ModelError(
            f"{marker.model_name}: the base does not load: {type(error).__name__}: {shortened(str(error))}"
        ) from error
    with torch.no_grad():
        parameters = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in adapted.get_base_model().named_parameters()
        }
        for name, weight in merged_weights(adapted):
            parameters[name].copy_(weight)
    for path in folder.glob("adapter_*"):
        path.unlink()
    try:
        write_whole(adapted.unload(), folder)
    except SafetensorError as error:
        raise CheckpointError(
            f"the merged model cannot be written: {error}; make room, or choose another folder"
        ) from error


def _load_adapted(folder: Path, marker: CheckpointMarker, device: str) -> PeftModel:
    base = load_model(marker.model_name, dtype=marker.settings.get("dtype", "auto"), device=device)
    return PeftModel.from_pretrained(base, folder).eval()


def add_generation_config(folder: Path, marker: CheckpointMarker) -> None:
    """The base model's: one that was built on shared memory has none of its own.

    A checkpoint from elsewhere may name any folder as its base, and a plan any as the hub's cache, so no link in one is
    followed but to the `blobs` beside its `snapshots`, as in that cache, and only a JSON object is taken.

    Raises:
        CheckpointError: the file is a link, no regular file, too long, or no JSON object.
    """
    base = checkpoint_folder(marker.model_name)
    if base is None or not (base / GENERATION_CONFIG).is_file():
        return
    path, target = base / GENERATION_CONFIG, (base / GENERATION_CONFIG).resolve()
    snapshots = base.resolve().parent
    is_cached = snapshots.name == "snapshots" and target.parent == snapshots.parent / "blobs"
    with open_regular(target if is_cached else path) as file:
        content = file.read(MAX_GENERATION_CONFIG_BYTES + 1)
    try:
        table = json.loads(content) if len(content) <= MAX_GENERATION_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise CheckpointError(
            f"{path}: is no JSON object of at most {MAX_GENERATION_CONFIG_BYTES} bytes: correct or remove it"
        )
    (folder / GENERATION_CONFIG).write_text(json.dumps(table, indent=2) + "\n")


# --- the check -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def check(folder: Path, device: str, base: Path | None = None) -> str:
    """Load the folder as others will, and sample once; returns what it sampled.

    Args:
        base: the folder of the model that an adapter is of, where there is one on this machine.

    Raises:
        ModelError: tensors are missing or not finite, or nothing is sampled.
    """
    _require_own_weights(folder)
    _try_small_parts(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        with _limited_by(_num_bytes(folder, base), device):
            model = _load_exported(folder, device)
    except ModelError:
        raise
    except Exception as error:  # transformers and its parsers raise anything at values of another type
        raise ModelError(f"the exported model does not load: {type(error).__name__}: {error}") from error
    # Beams and processors of the folder's own may take any memory, and PEFT reads them from the base model.
    model.generation_config = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    prompt = _prompt(tokenizer).to(device)
    try:
        with _limited_by(sum(parameter.nbytes for parameter in model.parameters()), device):
            is_finite = bool(torch.isfinite(model(**prompt).logits).all())
            sampled = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    except Exception as error:  # layers raise anything at settings that do not fit, or for want of memory
        raise ModelError(
            f"the exported model samples nothing: {type(error).__name__}: {shortened(str(error))}; is its config.json "
            "that of its tensors?"
        ) from error
    if not is_finite:
        raise ModelError("the exported model's logits are not finite: export another checkpoint (--step)")
    answer = _decoded(tokenizer, sampled[0, prompt["input_ids"].shape[1] :].tolist())
    return f"it loads, and answers {PROMPT!r} with {answer!r}"


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    """The beginning of a text, decoded in a process with limits: replacements of a decoder multiply it, too.

    Raises:
        ModelError: it takes more than `TRIAL_CPU_S` or `TRIAL_BYTES`, or raises an error.
    """
    reading, writing = os.pipe()

    def decode() -> int:
        os.write(writing, tokenizer.decode(tokens)[:MAX_ANSWER_CHARS].encode(errors="replace"))
        return 0

    with open(reading, "rb") as answer:
        try:
            code = _try(decode)
        finally:
            os.close(writing)
        if code:
            raise ModelError("the exported model samples tokens that its tokenizer does not decode")
        return answer.read().decode()


def require_base(marker: CheckpointMarker) -> None:
    """Build the base model of an adapter without memory, in a process with limits: a run from elsewhere may bring it.

    One of the hub is downloaded.

    Raises:
        ModelError: it takes more than `TRIAL_CPU_S` or `TRIAL_BYTES`, is larger than its tensors, is an adapter itself,
            or has a pipe or device.
    """
    base = checkpoint_folder(marker.model_name)
    if base is None or (is_from_hub(marker.model_name) and not _weight_files(base)):
        base = download_checkpoint(marker.model_name)
    if (base / ADAPTER_CONFIG).exists():  # transformers loads it, with settings that `require_adapter` has not seen
        raise ModelError(f"{base}: the base of the adapter is an adapter itself: merge that into its own base first")
    for path in base.iterdir():
        try:
            if not path.is_dir():
                with open_file(path) as file:
                    require_written(file)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}: correct or remove it") from None
    _require_own_weights(base)
    _try(partial(_trial_of_model, base))


def _require_own_weights(folder: Path) -> None:
    """Refuse settings that name weights elsewhere: a library waits for a pipe there, where no signal ends it.

    Raises:
        ModelError: an index, or the settings, name a file in another folder.
    """
    for path in (folder / "config.json", *folder.glob("*.index.json")):
        try:
            settings = json.loads(read_whole(path, max_bytes=MAX_INDEX_BYTES).decode())
            named = [*(settings.get("weight_map") or {}).values(), settings.get("transformers_weights") or ""]
        except (FileNotFoundError, ValueError, RecursionError, AttributeError):
            continue  # said where it is loaded
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}: correct or remove it") from None
        for name in named:
            if not isinstance(name, str) or os.path.basename(name) != name:
                what = shortened(repr(name))
                raise ModelError(f"{path}: names weights that are not beside it ({what}): correct or remove it")


def _try_small_parts(folder: Path) -> None:
    """Encode the question, and build the model without memory, in a process with limits.

    Both files may be somebody else's work: replacements in `tokenizer.json` multiply a text, a `config.json` of some
    hundred bytes describes layers without end, and the library of tokenizers is not interrupted by signals.

    Raises:
        ModelError: they take more than `TRIAL_CPU_S` or `TRIAL_BYTES`, or the model is larger than its tensors.
    """
    _try(partial(_trial, folder))


def _try(trial: Callable[[], int]) -> int:
    """Do it in a process with limits; returns its exit code.

    Raises:
        ModelError: it takes more than `TRIAL_CPU_S` or `TRIAL_BYTES`, or finds a model larger than its tensors.
    """
    child = os.fork()
    if not child:
        code = _FAILED
        try:
            _limit_trial()
            code = trial()
        except MemoryError:
            code = _TOO_LARGE
        finally:  # what else it raises is raised again, and reported, where the folder is loaded
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == _UNLIKE:
        raise ModelError(
            "the exported model does not load: config.json describes a larger model than its tensors are: the "
            "checkpoint, or the base of its adapter, is damaged"
        )
    if code == _TOO_LARGE or code < 0:
        raise ModelError(
            f"the exported model does not load: its tokenizer or config.json takes more than {TRIAL_CPU_S} s of CPU or "
            f"{TRIAL_BYTES >> 30} GiB: the checkpoint is damaged"
        )
    return code


_FAILED, _UNLIKE, _TOO_LARGE = 1, 2, 3
_PACKED = 8
"""Parameters in one element of a quantized model that is stored as int32, with four bits each."""


def _limit_trial() -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, TRIAL_CPU_S),
        (resource.RLIMIT_AS, _address_space() + TRIAL_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(5 * TRIAL_CPU_S)  # of a process that waits and takes no CPU
    torch.set_num_threads(1)


def _trial(folder: Path) -> int:
    """What the process of `_try_small_parts` does; returns its exit code."""
    if not (folder / ADAPTER_CONFIG).is_file() and (code := _trial_of_model(folder)):
        return code
    _prompt(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    return 0


def _trial_of_model(folder: Path) -> int:
    """Build the model of a folder without memory; returns the exit code."""
    config, sizes = AutoConfig.from_pretrained(folder, trust_remote_code=False), _sizes(folder)
    if sizes and config.get_text_config().num_hidden_layers > len(sizes):
        return _UNLIKE
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    stored = sum(sizes) or sum(path.stat().st_size for path in folder.glob("*.bin"))
    if hasattr(config, "quantization_config"):
        stored *= _PACKED
    is_larger = sum(each.numel() for each in (*model.parameters(), *model.buffers())) > stored + MAX_SPARE_ELEMENTS
    return _UNLIKE if is_larger else 0


def _weight_files(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("*.bin")]


def _sizes(folder: Path) -> list[int]:
    """Elements of each tensor in the files of a folder."""
    sizes: list[int] = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            sizes += (prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return sizes


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _prompt(tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    """A question in the chat template; as plain text where there is none, or it renders no single question."""
    text = PROMPT
    if tokenizer.chat_template:
        message = [{"role": "user", "content": PROMPT}]
        try:
            with _limited(RENDER_S, RENDER_BYTES):
                text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            if len(text) > MAX_PROMPT_CHARS:
                raise TemplateError(f"{len(text):,} characters, and at most {MAX_PROMPT_CHARS:,} are sampled from")
        except (TemplateError, TimeoutError, MemoryError) as error:
            why = str(error) or "it needs too much memory"
            log.warning("the chat template renders no single question (%s); checked with plain text", why)
            text = PROMPT
    return tokenizer(text, return_tensors="pt", add_special_tokens=text == PROMPT, return_token_type_ids=False)


def _num_bytes(folder: Path, base: Path | None) -> int:
    """What loading a model may take: as much again as its files, as often as their numbers may be unpacked."""
    files = (path for each in (folder, base) if each is not None for path in each.iterdir() if path.is_file())
    return _PACKED * sum(path.stat().st_size for path in files)


def _limited_by(num_bytes: int, device: str) -> AbstractContextManager[None]:
    """The limits of what works on a model of so many bytes."""
    most = SAMPLE_BYTES + num_bytes if device == "cpu" else resource.RLIM_INFINITY
    return _limited(SAMPLE_S * (1 + (num_bytes >> 30)), most)


@contextmanager
def _limited(seconds: int, num_bytes: int) -> Iterator[None]:
    """Within, this process has so much time, and so much memory further: what it computes may be somebody else's work.

    Raises:
        TimeoutError: it took longer.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"it takes longer than {seconds} s")

    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = num_bytes if num_bytes == resource.RLIM_INFINITY else used + num_bytes
    most = [limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY]
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (min(most, default=resource.RLIM_INFINITY), hard))
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again: a library may catch the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _load_exported(folder: Path, device: str) -> PreTrainedModel:
    """As `from_pretrained` loads it, which only logs tensors that are missing."""
    if (folder / ADAPTER_CONFIG).is_file():
        model: PreTrainedModel = AutoPeftModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            wrong = sorted(set(file.keys()) ^ adapter_tensors(model).keys())
    else:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, trust_remote_code=False
        )
        wrong = [*loading["missing_keys"], *loading["unexpected_keys"], *loading["mismatched_keys"]]
    if wrong:
        raise ModelError(f"the exported model does not load: missing or wrong tensors: {first_of(map(str, wrong))}")
    return model.to(device).eval()
