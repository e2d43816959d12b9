"""What runs inside vLLM's worker processes: sharing the weights, and not outliving the server.

vLLM imports this module (`worker_extension_cls`) before it loads the model and mixes `GrpoWorker` into its worker. The
import is the only hook that early, so here, and only in processes that our server started, importing has effects: the
patches are applied and the watch begins. Elsewhere it does nothing. The server itself must not import it: a forked
child would find it imported already, and nothing would begin.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.errors import BridgeError
from grpo_engine.server.vllm_patches import Patch
from grpo_engine.server.vllm_processes import SERVER_VARIABLE, SHARE_VARIABLE, is_resource_tracker
from grpo_engine.server.vllm_requirements import FAST_LOADER

if TYPE_CHECKING:
    from torch import Tensor

_WATCH_INTERVAL_S = 0.25
_WATCH_NAME = "grpo-server-watch"
_PATCHED = "_grpo_keeps_weights"


class GrpoWorker:
    """Methods for `collective_rpc`; mixed into vLLM's worker, whose attributes it uses."""

    model_runner: Any
    vllm_config: Any
    add_lora: Callable[[Any], bool]
    reload_weights: Callable[..., None]

    def grpo_share(
        self, segment: str, expected: dict[str, list[int]], aliases: dict[str, str], folder: str | None
    ) -> dict[str, Any]:
        """Make the weights mappable and describe them under the names that transformers gives them.

        Args:
            segment: name of the POSIX segment to make; not used on a GPU, whose memory stays where it is.
            expected: parameter name → shape, as transformers has them; a tied parameter stands once.
            aliases: tied parameters: the second name → the first.
            folder: where the checkpoint lies; a sample of every tensor is compared with it.

        Returns:
            `tensors` (name → `SharedTensor`), `fused` (the same by vLLM's own names, on a GPU alone) and
            `num_compared`, or `problem`: an exception would end the worker on some versions.
        """
        from grpo_engine.server.vllm_layout import compare_with_checkpoint, fused_parameters, views_under_hf_names

        try:
            self._grpo_check_shareable()
            model = self.model_runner.get_model()
            views = views_under_hf_names(model, {name: tuple(shape) for name, shape in expected.items()}, aliases)
            num_compared = compare_with_checkpoint(views, Path(folder)) if folder else 0
            fused: dict[str, Any] = {}
            if next(iter(views.values())).is_cuda:
                from grpo_engine.bridges.cuda_tensors import export_cuda_tensors

                manifest = export_cuda_tensors(views)
                fused = export_cuda_tensors(fused_parameters(model))
            else:
                from grpo_engine.server.vllm_layout import move_into_segment

                base = move_into_segment(model, segment)
                views = views_under_hf_names(model, {name: tuple(s) for name, s in expected.items()}, aliases)
                manifest = {name: _described(view, segment, base) for name, view in views.items()}
        except BridgeError as error:
            return {"problem": str(error)}
        return {
            "tensors": {name: entry.model_dump(mode="json") for name, entry in manifest.items()},
            "fused": {name: entry.model_dump(mode="json") for name, entry in fused.items()},
            "num_compared": num_compared,
        }

    def grpo_patches(self) -> dict[str, bool]:
        """Which patches are in place in this process (`vllm_patches.py`)."""
        from vllm.model_executor.layers import utils

        return {
            Patch.KEEP_CPU_WEIGHTS.value: getattr(utils, _PATCHED, False),
            Patch.WATCH_SERVER.value: any(thread.name == _WATCH_NAME for thread in threading.enumerate()),
        }

    def grpo_cache_bytes(self) -> int | None:
        """Size of the KV cache on this GPU where it was measured, and not given."""
        measured = getattr(self, "available_kv_cache_memory_bytes", None)
        return None if measured is None else int(measured)

    def grpo_reload(self, path: str) -> None:
        """Read a checkpoint in place: tensor by tensor, since the GPU's memory is given away by now."""
        load_config = self.vllm_config.load_config
        if load_config.load_format == FAST_LOADER:
            load_config.load_format = "auto"
        self.reload_weights(weights_path=path)

    def grpo_load_adapter(self, number: int, name: str, path: str, modules: list[str]) -> dict[str, Any]:
        """Load an adapter, and see that it reaches what it was made for.

        vLLM (0.20 to 0.33) says nothing when factors find no layer: the adapter is served, and changes nothing.

        Args:
            number: what vLLM knows the adapter by; one that was used before would not be read again.
            modules: what the adapter changes, as its file names them.

        Returns:
            `unbound`: those of the modules that found no layer; or `problem`. The caller removes it in both cases:
            an adapter that failed may lie half in its place, and counts as loaded.
        """
        from vllm.lora.request import LoRARequest

        try:
            self.add_lora(LoRARequest(lora_name=name, lora_int_id=number, lora_path=path))
            bound = self._grpo_bound(number)
            names = self._grpo_vllm_names(modules)
        except Exception as error:  # vLLM and safetensors raise what they like; across processes it would end a worker
            return {"problem": f"{type(error).__name__}: {error}"}
        return {"unbound": [module for module in modules if names[module] not in bound]}

    def _grpo_bound(self, number: int) -> set[str]:
        """Modules for which vLLM finds factors of the adapter; parts of fused ones by their own names."""
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(number)
        bound: set[str] = set()
        for name in manager.modules:
            weights = manager._get_lora_layer_weights(adapter, name)
            if weights is None:
                continue
            if isinstance(weights.lora_a, list):
                parts = manager.packed_modules.get(name, [name])
                bound.update(part for part, factor in zip(parts, weights.lora_a, strict=False) if factor is not None)
            else:
                bound.add(name)
        return bound

    def _grpo_vllm_names(self, modules: list[str]) -> dict[str, str]:
        """Names in an adapter's file → vLLM's, which differ where a language model stands inside another one."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        for renames_alone in ("get_rename_mapper", "get_unstacked_mapper"):  # 0.32; 0.26
            if hasattr(mapper, renames_alone):
                mapper = getattr(mapper, renames_alone)()
                break
        return {
            module: parse_fine_tuned_lora_name(f"base_model.model.{module}.lora_A.weight", mapper)[0]
            for module in modules
        }

    def _grpo_check_shareable(self) -> None:
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        if model.quantization is not None:
            raise BridgeError(
                f"{model.model}: quantized ({model.quantization}); only plain weights can be shared: "
                "serve an unquantized checkpoint"
            )
        if getattr(model, "enable_sleep_mode", False):
            raise BridgeError("sleep mode keeps weights in memory that cannot be exported: start without it")
        if parallel.tensor_parallel_size * parallel.pipeline_parallel_size != 1:
            raise BridgeError("the model is spread over several GPUs; only a whole one can be shared")
        for name, parameter in self.model_runner.get_model().named_parameters():
            if parameter.dtype != model.dtype:
                raise BridgeError(
                    f"{name} is {parameter.dtype}, but the model is {model.dtype}: vLLM computes this architecture in "
                    "mixed precision, which a trainer cannot share"
                )


def keep_cpu_weights() -> None:
    """Have vLLM's CPU build compute with the weights themselves instead of repacked copies.

    Breaks: sharing. Its linear layers are repacked for oneDNN or AMX after loading, and `layer.weight` is replaced by
    an empty tensor, so that nothing written later is ever read.
    When: CPU platform, unquantized weights. Versions: 0.26 to 0.33; a version without these names is refused.
    Upstream: https://github.com/vllm-project/vllm, `vllm/model_executor/layers/utils.py`,
    `dispatch_cpu_unquantized_gemm`; there is no setting for it.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    if getattr(utils, _PATCHED, False):
        return
    for module, name in ((_custom_ops, "_supports_onednn"), (utils, "check_cpu_sgl_kernel")):
        if not hasattr(module, name):
            raise BridgeError(f"{module.__name__} has no {name}: this vLLM cannot share weights on a CPU; use 0.32")
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_args, **_kwargs: False
    setattr(utils, _PATCHED, True)


def watch_server(server: ProcessIdentity) -> None:
    """End vLLM's processes when the server is gone.

    Breaks: a server that is killed leaves `EngineCore` behind, which holds the GPU. Versions: seen in 0.26 and 0.32;
    upstream: https://github.com/vllm-project/vllm/issues/55510.
    """
    threading.Thread(target=_end_with, args=(server,), name=_WATCH_NAME, daemon=True).start()


def _end_with(server: ProcessIdentity) -> None:
    me = psutil.Process()
    engine = next((p for p in (me, *me.parents()) if p.ppid() == server.pid), me)
    while server.is_alive():
        time.sleep(_WATCH_INTERVAL_S)
    try:
        others = [engine, *engine.children(recursive=True)]
    except psutil.NoSuchProcess:
        others = []
    for process in others:
        # A resource tracker ends by itself, after removing what the others left in shared memory.
        if process.pid != me.pid and not is_resource_tracker(process):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
    os.kill(os.getpid(), signal.SIGKILL)


def _described(view: Tensor, segment: str, base: int) -> Any:
    from grpo_engine.wire.bridge_file import PosixHandle, SharedTensor

    return SharedTensor(
        handle=PosixHandle(segment=segment, offset_bytes=view.data_ptr() - base),
        shape=tuple(view.shape),
        stride=tuple(view.stride()),
        dtype=str(view.dtype),
    )


def _begin() -> None:
    text = os.environ.get(SERVER_VARIABLE)
    if text is None:
        return
    pid, _, start_ticks = text.partition(":")
    if int(pid) == os.getpid():
        return
    watch_server(ProcessIdentity(int(pid), int(start_ticks)))
    if os.environ.get(SHARE_VARIABLE) == "1":
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            keep_cpu_weights()


_begin()
