"""Atropos's bridge file on a GPU: what one process exports, another maps and writes."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_engine.bridges.memory.cuda_tensors import gpu_uuid, map_cuda_tensors
from grpo_engine.bridges.memory.stock_bridge_file import Sizes, as_bridge_file, read_stock_file
from grpo_engine.wire.bridge_file import StockHandle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SIZES = Sizes(query=64, key_value=16, intermediate=48, vocabulary=101, is_tied=True)
EXPORTER = """
import sys
from pathlib import Path
import torch
from grpo_engine.bridges.memory.cuda_tensors import export_cuda_tensors
from grpo_engine.bridges.memory.stock_bridge_file import stock_form

torch.manual_seed(0)
def fused(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
weights = {
    "model.embed_tokens.weight": fused(128, 32),
    "model.layers.0.self_attn.qkv_proj.weight": fused(96, 32),
    "model.layers.0.self_attn.qkv_proj.bias": fused(96),
    "model.layers.0.mlp.gate_up_proj.weight": fused(96, 32),
}
Path(sys.argv[1]).write_text(stock_form("m", export_cuda_tensors(weights)).model_dump_json())
print("exported", flush=True)
sys.stdin.readline()  # the reader has written
torch.cuda.synchronize()
qkv = weights["model.layers.0.self_attn.qkv_proj.weight"]
print(*(int(rows.float().mean()) for rows in qkv.split([64, 16, 16])), flush=True)
sys.stdin.readline()
"""


def map_like_atropos(handle: StockHandle) -> torch.Tensor:
    """The tensor that Atropos's trainer makes of an entry of `ipc_handles`."""
    storage = torch.UntypedStorage._new_shared_cuda(
        handle.device_index,
        base64.b64decode(handle.ipc_handle_b64),
        handle.storage_size,
        handle.storage_offset_orig,
        base64.b64decode(handle.ref_counter_handle_b64),
        handle.ref_counter_offset,
        base64.b64decode(handle.event_handle_b64),
        handle.event_sync_required,
    )
    dtype = getattr(torch, handle.dtype.removeprefix("torch."))
    empty = torch.tensor([], dtype=dtype, device=f"cuda:{handle.device_index}")
    return empty.set_(storage, handle.tensor_storage_offset, handle.shape, handle.stride)


def test_atropos_and_our_trainer_map_the_same_export(tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    exporter = subprocess.Popen(
        [sys.executable, "-c", EXPORTER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert exporter.stdout is not None
    assert exporter.stdin is not None
    try:
        assert exporter.stdout.readline() == "exported\n"
        torch.cuda.init()
        file = read_stock_file(path)
        theirs = {name: map_like_atropos(handle) for name, handle in file.ipc_handles.items()}
        ours = map_cuda_tensors(as_bridge_file(file, SIZES, gpu_uuid).tensors)
        attention = "model.layers.0.self_attn"
        queries, keys, values = (ours[f"{attention}.{part}_proj.weight"] for part in "qkv")
        assert torch.equal(torch.cat([queries, keys, values]), theirs[f"{attention}.qkv_proj.weight"])
        assert torch.equal(ours[f"{attention}.v_proj.bias"], theirs[f"{attention}.qkv_proj.bias"][-16:])
        assert torch.equal(ours["model.embed_tokens.weight"], theirs["model.embed_tokens.weight"][:101])
        up = ours["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(up, theirs["model.layers.0.mlp.gate_up_proj.weight"][48:])
        queries.fill_(1)
        values.fill_(3)
        theirs[f"{attention}.qkv_proj.weight"][64:80].fill_(2)
        torch.cuda.synchronize()
        exporter.stdin.write("written\n")
        exporter.stdin.flush()
        assert exporter.stdout.readline() == "1 2 3\n"
        del ours, theirs, queries, keys, values, up
        torch.cuda.ipc_collect()
        exporter.communicate("end\n", timeout=30)
        assert exporter.returncode == 0
    finally:
        exporter.kill()
        exporter.wait()
