"""Code inside vLLM's worker processes: sharing the weights, and exiting with the server.

vLLM imports this module (`worker_extension_cls`) before it loads the model, and mixes `GrpoWorker` into its worker. The
import is the only hook that early. So importing has effects here, but only in processes that our server started: the
patches are applied and the watch thread starts. The server itself must not import it: in a forked child it would be
imported already, and neither would happen.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from grpo_engine.errors import BridgeError
from grpo_engine.processes import ProcessIdentity, ProcessTree, is_resource_tracker, running, terminate, wait_gone
from grpo_engine.ranks.listeners import close_ports_of_gloo, has_closed_ports_of_gloo
from grpo_engine.server.vllm.patches import Patch, unlink_group_memory
from grpo_engine.wire.environment_variables import VLLM_SERVER_VARIABLE, VLLM_SHARE_VARIABLE

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_engine.server.receiving import Part, WeightReceiver
    from grpo_engine.server.staged import StagedReceiver

_WATCH_INTERVAL_S = 0.25
_GRACE_S = 3.0
"""For a step that has begun, and its ranks' exits; they take a second (two H200)."""
_WATCH_NAME = "grpo-server-watch"
_PATCHED = "_grpo_keeps_weights"
_handlers: list[Any] = []
"""Of SIGTERM, before this module's own."""


class GrpoWorker:
    """Methods for `collective_rpc`; mixed into vLLM's worker, whose attributes it uses."""

    model_runner: Any
    vllm_config: Any
    rank: int
    add_lora: Callable[[Any], bool]
    sleep: Callable[..., None]
    wake_up: Callable[..., None]

    _grpo_receiver: WeightReceiver | None = None
    _grpo_staged: StagedReceiver | None = None
    _grpo_parts: dict[str, Part]
    _grpo_lacks_cache: bool = False
    """Weights are allocated again, and the cache is not."""

    @property
    def _grpo_rank(self) -> int:
        return int(self.rank % self._grpo_num_ranks)

    @property
    def _grpo_num_ranks(self) -> int:
        return int(self.vllm_config.parallel_config.tensor_parallel_size)

    def grpo_share(
        self, segment: str, expected: dict[str, list[int]], aliases: dict[str, str], folder: str | None
    ) -> dict[str, Any]:
        """Make the weights mappable and describe them under their names in transformers.

        Args:
            segment: name of the POSIX segment to create, of several processes with the rank behind it; not used on a
                GPU, whose memory is exported in place.
            expected: parameter name → shape in transformers; a tied parameter is listed once.
            aliases: tied parameters: the second name → the first.
            folder: the checkpoint's folder; a sample of every tensor is compared with it.

        Returns:
            `tensors` (name → `WeightPart`), `fused` (`SharedTensor` by vLLM's own names, only on a GPU), `num_compared`
            and `is_all_of_checkpoint`, or `problem`: an exception would stop the worker in some versions.
        """
        from grpo_engine.server.vllm.layout import (
            compare_with_checkpoint,
            fused_parameters,
            has_stored_buffers,
            parts_under_hf_names,
        )

        try:
            self._grpo_check_shareable()
            model = self.model_runner.get_model()
            shapes = {name: tuple(shape) for name, shape in expected.items()}
            rank, num_ranks = self._grpo_rank, self._grpo_num_ranks
            parts = parts_under_hf_names(model, shapes, aliases, rank=rank, num_ranks=num_ranks)
            num_compared = compare_with_checkpoint(parts, Path(folder)) if folder else 0
            views = {name: part.memory for name, part in parts.items()}
            fused: dict[str, Any] = {}
            if next(iter(views.values())).is_cuda:
                from grpo_engine.bridges.memory.cuda_tensors import export_cuda_tensors

                manifest = export_cuda_tensors(views)
                fused = export_cuda_tensors(fused_parameters(model))
            else:
                from grpo_engine.server.vllm.layout import move_into_segment

                segment = f"{segment}-{rank}" if num_ranks > 1 else segment
                base = move_into_segment(model, segment)
                parts = parts_under_hf_names(model, shapes, aliases, rank=rank, num_ranks=num_ranks)
                manifest = {name: _described(part.memory, segment, base) for name, part in parts.items()}
        except BridgeError as error:
            return {"problem": str(error)}
        return {
            "tensors": {
                name: {**entry.model_dump(mode="json"), "start": parts[name].start, "whole": list(shapes[name])}
                for name, entry in manifest.items()
            },
            "fused": {name: entry.model_dump(mode="json") for name, entry in fused.items()},
            "num_compared": num_compared,
            "is_all_of_checkpoint": not (self.vllm_config.speculative_config or has_stored_buffers(model)),
        }

    def grpo_check_read(self, expected: dict[str, list[int]], aliases: dict[str, str], folder: str) -> str | None:
        """Why the weights are not those of the checkpoint that was read, or None; arguments as for `grpo_share`."""
        from grpo_engine.server.vllm.layout import compare_with_checkpoint, parts_under_hf_names

        model, shapes = self.model_runner.get_model(), {name: tuple(shape) for name, shape in expected.items()}
        try:
            parts = parts_under_hf_names(model, shapes, aliases, rank=self._grpo_rank, num_ranks=self._grpo_num_ranks)
            compare_with_checkpoint(parts, Path(folder), has_all=True)
        except BridgeError as error:
            return str(error)
        return None

    def grpo_join(
        self, request: dict[str, Any], expected: dict[str, list[int]], aliases: dict[str, str], folder: str | None
    ) -> str | None:
        """Begin to meet the members of a weight group; why that is impossible, or None.

        Args:
            request: a `JoinRequest`.
            expected, aliases, folder: as for `grpo_share`.
        """
        from grpo_engine.server.receiving import WeightReceiver
        from grpo_engine.server.vllm.layout import compare_with_checkpoint, parts_under_hf_names
        from grpo_engine.wire.inference import JoinRequest

        self.grpo_leave()
        try:
            self._grpo_check_plain()
            shapes = {name: tuple(shape) for name, shape in expected.items()}
            parts = parts_under_hf_names(
                self.model_runner.get_model(), shapes, aliases, rank=self._grpo_rank, num_ranks=self._grpo_num_ranks
            )
            if folder is not None:
                compare_with_checkpoint(parts, Path(folder))
            self._grpo_receiver = WeightReceiver(JoinRequest.model_validate(request), parts, local_rank=self._grpo_rank)
        except BridgeError as error:
            return str(error)
        return None

    def grpo_receive(self, with_checksum: bool) -> dict[str, Any]:
        """Take the weights that are sent now: `checksum`, or `problem`."""
        if self._grpo_receiver is None:
            return {"problem": "no weight group was joined"}
        try:
            return {"checksum": self._grpo_receiver.receive(with_checksum=with_checksum)}
        except BridgeError as error:
            return {"problem": str(error)}

    def grpo_find_weights(
        self, expected: dict[str, list[int]], aliases: dict[str, str], folder: str | None = None
    ) -> str | None:
        """Find where the weights are, for `grpo_write` and `grpo_wake_weights`; why they cannot be written, or None.

        Args:
            expected, aliases, folder: as for `grpo_share`.
        """
        from grpo_engine.server.vllm.layout import compare_with_checkpoint, parts_under_hf_names

        try:
            self._grpo_check_plain()
            shapes = {name: tuple(shape) for name, shape in expected.items()}
            self._grpo_parts = parts_under_hf_names(self.model_runner.get_model(), shapes, aliases)
            if folder is not None:
                compare_with_checkpoint(self._grpo_parts, Path(folder))
        except BridgeError as error:
            return str(error)
        return None

    def grpo_write(self, layer: dict[str, Tensor]) -> None:
        """Copy weights, by their names in transformers; in the process of the caller alone."""
        for name, values in layer.items():
            self._grpo_parts[name].memory.copy_(values.detach())

    def grpo_sleep(self) -> None:
        """Free weights and cache; the weights' values are lost. Not on a CPU, whose vLLM has no sleep mode."""
        if not self.vllm_config.model_config.enable_sleep_mode:
            return
        if self._grpo_lacks_cache:  # a trainer exited while it handed its weights over
            self.wake_up(tags=["kv_cache"])
            self._grpo_lacks_cache = False
        self.sleep(level=2)

    def grpo_wake_weights(self, request: dict[str, Any]) -> str | None:
        """Allocate the weights at the same addresses again, and make ready to take their values; or why not.

        Args:
            request: a `WakeRequest`.
        """
        from grpo_engine.server.staged import StagedReceiver
        from grpo_engine.wire.inference import WakeRequest

        if self._grpo_staged is None:
            self._grpo_staged = StagedReceiver()
        try:
            if self.vllm_config.model_config.enable_sleep_mode:
                self.wake_up(tags=["weights"])
                self._grpo_lacks_cache = True
            self._grpo_staged.begin(WakeRequest.model_validate(request), self._grpo_parts)
        except (BridgeError, RuntimeError) as error:  # CUDA: out of memory
            return str(error)
        return None

    def grpo_take(self, number: int) -> str | None:
        """Copy what the staging memory holds; or why not."""
        assert self._grpo_staged is not None
        try:
            self._grpo_staged.take(number)
        except (BridgeError, RuntimeError) as error:
            return str(error)
        return None

    def grpo_wake_cache(self, with_checksum: bool) -> dict[str, Any]:
        """Allocate the cache again, now that all weights were taken: `checksum`, or `problem`."""
        assert self._grpo_staged is not None
        try:
            checksum = self._grpo_staged.end(with_checksum=with_checksum)
            if self._grpo_lacks_cache:
                self.wake_up(tags=["kv_cache"])
                self._grpo_lacks_cache = False
        except (BridgeError, RuntimeError) as error:
            return {"problem": str(error)}
        return {"checksum": checksum}

    def grpo_leave(self) -> None:
        """Leave the weight group."""
        if self._grpo_receiver is not None:
            self._grpo_receiver.close()
            self._grpo_receiver = None

    def grpo_loaded(self) -> None:
        """From here on vLLM handles SIGTERM: it ends its step first."""
        if signal.getsignal(signal.SIGTERM) is _leave:  # vLLM 0.26 has set its own by now
            signal.signal(signal.SIGTERM, _handlers.pop())

    def grpo_synchronize(self) -> None:
        """Return when the GPU has computed what this process has launched."""
        _synchronize()

    def grpo_patches(self) -> dict[str, bool]:
        """The patches of this process (`patches.py`), and whether each is in place."""
        from vllm.model_executor.layers import utils

        return {
            Patch.KEEP_CPU_WEIGHTS.value: getattr(utils, _PATCHED, False),
            Patch.CLOSE_PORTS.value: has_closed_ports_of_gloo(),
            Patch.WATCH_SERVER.value: any(thread.name == _WATCH_NAME for thread in threading.enumerate()),
        }

    def grpo_cache_bytes(self) -> int | None:
        """Size of the KV cache on this GPU; None if it was configured rather than measured."""
        measured = getattr(self, "available_kv_cache_memory_bytes", None)
        return None if measured is None else int(measured)

    def grpo_load_adapter(self, number: int, name: str, path: str, modules: list[str]) -> dict[str, Any]:
        """Load an adapter, and check that every factor reached a layer.

        vLLM (0.20 to 0.33) ignores factors without a layer: the adapter is served, and changes nothing.

        Args:
            number: vLLM's id of the adapter; an id that was used before would not be loaded again.
            modules: the modules that the adapter changes, as its file names them.

        Returns:
            `unbound`: the modules without a layer; or `problem`. The caller removes the adapter in both cases: a failed
            one may be loaded in part.
        """
        from vllm.lora.request import LoRARequest

        try:
            self.add_lora(LoRARequest(lora_name=name, lora_int_id=number, lora_path=path))
            bound = self._grpo_bound(number)
            names = self._grpo_vllm_names(modules)
        except Exception as error:  # vLLM and safetensors raise many types, which would stop the worker
            return {"problem": f"{type(error).__name__}: {error}"}
        return {"unbound": [module for module in modules if names[module] not in bound]}

    def _grpo_bound(self, number: int) -> set[str]:
        """Modules for which vLLM has factors of the adapter; parts of fused modules by their own names."""
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
        """Names in an adapter's file → vLLM's, which differ where the language model is part of another model."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        for rename_only in ("get_rename_mapper", "get_unstacked_mapper"):  # 0.32; 0.26
            if hasattr(mapper, rename_only):
                mapper = getattr(mapper, rename_only)()
                break
        return {
            module: parse_fine_tuned_lora_name(f"base_model.model.{module}.lora_A.weight", mapper)[0]
            for module in modules
        }

    def _grpo_check_shareable(self) -> None:
        self._grpo_check_plain()
        if getattr(self.vllm_config.model_config, "enable_sleep_mode", False):
            raise BridgeError("weights in sleep mode cannot be exported: start without enable_sleep_mode")

    def _grpo_check_plain(self) -> None:
        """Refuse weights that are not those of the checkpoint, in one dtype."""
        model = self.vllm_config.model_config
        if model.quantization is not None:
            raise BridgeError(
                f"{model.model}: quantized ({model.quantization}); only unquantized weights can be trained: "
                "serve an unquantized checkpoint"
            )
        if self.vllm_config.parallel_config.pipeline_parallel_size != 1:
            raise BridgeError("the layers are split over several GPUs: choose tensor_parallel_size instead")
        for name, parameter in self.model_runner.get_model().named_parameters():
            if parameter.dtype != model.dtype:
                raise BridgeError(
                    f"{name} is {parameter.dtype}, but the model is {model.dtype}: vLLM computes this architecture in "
                    "mixed precision, which cannot be shared with a trainer"
                )


def keep_cpu_weights() -> None:
    """Make vLLM's CPU build compute with the weights themselves instead of repacked copies.

    Breaks: sharing. Its linear layers are repacked for oneDNN or AMX after loading, and `layer.weight` is replaced by
    an empty tensor, so that later writes have no effect.
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


def exit_between_kernels() -> None:
    """Exit at SIGTERM while the model is loaded, once the GPU has computed what was launched.

    Breaks: ending a server that loads. vLLM's engine core exits at once until it has loaded (0.26), or not before
    (0.32). Killed within a kernel it would, under MPS, be a fault of all that share the GPU. The main thread launches
    the kernels, and runs the handler between two of them.
    """
    if threading.current_thread() is threading.main_thread():
        _handlers.append(signal.signal(signal.SIGTERM, _leave))


def _leave(_number: int, _frame: FrameType | None) -> None:
    with suppress(RuntimeError):  # while a CUDA graph is captured, which computes nothing
        _synchronize()
    os._exit(128 + signal.SIGTERM)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def watch_server(server: ProcessIdentity) -> None:
    """End vLLM's processes when the server has exited, in order: the engine core completes its step on all ranks.

    A rank that is killed leaves the others in a kernel that waits for it, and such a kernel, once it is killed too, is
    under MPS a fault of all that share the GPU (seen at two ranks on H200).

    Breaks: a killed server leaves `EngineCore` running, which keeps the GPU's memory. Versions: seen in 0.26 and 0.32;
    upstream: https://github.com/vllm-project/vllm/issues/55510.
    """
    engine = _engine_below(server)  # now: once the server is killed, nothing tells that the engine core was below it
    tree = ProcessTree([engine])
    threading.Thread(target=_exit_with, args=(server, engine, tree), name=_WATCH_NAME, daemon=True).start()


def _engine_below(server: ProcessIdentity) -> int:
    """The process of the engine core, or this one if the server is gone."""
    with suppress(psutil.Error):
        me = psutil.Process()
        return int(next((p.pid for p in (me, *me.parents()) if p.ppid() == server.pid), me.pid))
    return os.getpid()


def _exit_with(server: ProcessIdentity, engine: int, tree: ProcessTree) -> None:
    def others() -> list[ProcessIdentity]:
        return [each for each in tree.living() if each.pid != os.getpid() and not is_resource_tracker(each)]

    while server.is_alive():
        time.sleep(_WATCH_INTERVAL_S)
    terminate(partial(running, engine), grace_s=_GRACE_S)
    wait_gone(others, within_s=_GRACE_S)  # the ranks exit with the engine core, this one too
    for process in others():
        process.send_signal(signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _described(view: Tensor, segment: str, base: int) -> Any:
    from grpo_engine.wire.bridge_file import PosixHandle, SharedTensor

    return SharedTensor(
        handle=PosixHandle(segment=segment, offset_bytes=view.data_ptr() - base),
        shape=tuple(view.shape),
        stride=tuple(view.stride()),
        dtype=str(view.dtype),
    )


def _set_up_process() -> None:
    text = os.environ.get(VLLM_SERVER_VARIABLE)
    if text is None:
        return
    pid, _, start_ticks = text.partition(":")
    if int(pid) == os.getpid():
        return
    watch_server(ProcessIdentity(int(pid), int(start_ticks)))
    exit_between_kernels()
    close_ports_of_gloo()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        unlink_group_memory()
        if os.environ.get(VLLM_SHARE_VARIABLE) == "1":
            keep_cpu_weights()


_set_up_process()
