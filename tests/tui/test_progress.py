"""The phase of a start-up, from lines of real logs, and whether it makes progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_tui.services.inference import TORCH_PHASES, VLLM_PHASES
from grpo_tui.services.trainer import PHASES as TRAINER_PHASES
from grpo_tui.supervisor import progress
from grpo_tui.supervisor.progress import Movement, Progress

VLLM_ON_A_CPU = (
    ("INFO:     Started server process [6785]\n", "importing vLLM"),
    (
        "(MainProcess pid=6785) INFO 11-21 13:40:33 [model.py:733] Resolved architecture: LlamaForCausalLM\n"
        "(MainProcess pid=6785) INFO 11-21 13:40:33 [scheduler.py:307] Chunked prefill is enabled\n",
        "configuring the engine for LlamaForCausalLM",
    ),
    (
        "(EngineCore pid=7361) INFO 11-21 13:40:44 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        "model='/m', compilation_config={'max_autotune': False, 'cudagraph_capture_sizes': [1, 2]}\n",
        "starting the engine core",
    ),
    (
        "(Worker pid=7517) INFO 11-21 13:40:58 [cpu_model_runner.py:68] Starting to load model /m...\n"
        "(Worker pid=7517) INFO 11-21 13:40:58 [base_loader.py:82] Initializing model took 0.178423 seconds\n",
        "fetching the model",
    ),
    (
        "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?]\n",
        "loading weights, 0 of 1 shards",
    ),
    ("Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00]\n\n", "loading weights, 1 of 1 shards"),
    ("INFO 11-21 13:40:58 [default_loader.py:501] Loading weights took 0.02 seconds\n", "weights are loaded"),
    ("INFO 11-21 13:40:59 [cpu_model_runner.py:87] Warming up model for the compilation...\n", "compiling"),
    (
        "INFO 11-21 13:41:28 [decorators.py:743] [backbone] saved AOT compiled function to /c/model\n"
        "INFO 11-21 13:41:28 [monitor.py:91] [backbone] Initial profiling/warmup run took 0.02 s\n"
        "INFO 11-21 13:41:29 [cpu_model_runner.py:91] Warming up done.\n",
        "profiling memory",
    ),
    ("INFO 11-21 13:41:29 [kv_cache_utils.py:2327] CPU KV cache size: 1,048,576 tokens\n", "making the KV cache"),
    (
        "INFO 11-21 13:41:31 [core.py:402] init engine (profile, create kv cache, warmup model) took 32.04 s\n",
        "trying a first request",
    ),
)
"""vLLM 0.32, from its CPU build; from the weights on without the name of the process."""

VLLM_ON_GPUS = (
    (
        "Loading safetensors checkpoint shards:  67% Completed | 2/3 [00:18]\n(E)\n",
        "loading weights, 2 of 3 shards",
    ),
    (
        "(EngineCore pid=126) INFO 06-02 00:51:40 [model_runner.py:295] Model loading took 7.64 GiB and 33.0 seconds\n",
        "weights are loaded",
    ),
    (
        "(Worker_TP0 pid=52) INFO 05-06 05:40:50 [backends.py:1089] Using cache directory: "
        "~/.cache/vllm/torch_compile_cache/d43a213921/rank_0_0/backbone for vLLM's torch.compile\n",
        "compiling",
    ),
    ("INFO 05-06 [backends.py:393] Compiling a graph for compile range (1, 8192) takes 26.64 s\n", "compiling"),
    ("INFO 07-06 [decorators.py:311] Directly load AOT compilation from path /c/model", "loading compiled code"),
    ("\nINFO 05-06 05:41:30 [monitor.py:53] torch.compile took 48.89 s in total", "profiling memory"),
    ("\nINFO 04-20 20:13:51 [gpu_worker.py:437] Available KV cache memory: 0.67 GiB\n", "making the KV cache"),
    (
        "[AutoTuner]: Tuning mxfp8_gemm:  91%|█████████▏| 21/23 [00:00<00:00, 26.51it/s]",
        "tuning kernels, 21 of 23",
    ),
    (
        "\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  34%|███▍      | 12/35 [00:01<00:02, 10.60it/s]",
        "capturing CUDA graphs, 12 of 35",
    ),
    ("\rCapturing CUDA graphs (decode, FULL): 100%|███| 5/5 [00:01<00:00]\n", "capturing CUDA graphs, 5 of 5"),
    ("[gpu_model_runner.py:6456] Graph capturing finished in 6 secs, took 0.38 GiB\n", "CUDA graphs are captured"),
)
"""vLLM 0.20 to 0.27, from public logs; some without the name of the process."""

TORCH = (
    ("INFO:     Started server process [6786]\n", "importing torch"),
    ("13:46:36 INFO grpo_engine.models.loading: loading the weights of local/tiny\n", "loading weights"),
    (
        "13:46:38 INFO grpo_engine.server.torch.weights: ✓ Exported 21 params to /r/bridge.json\n",
        "weights are shared, 21 tensors",
    ),
)

TRAINER = (
    (
        "13:50:02 INFO grpo_engine.bridges.shared_vllm: attached to 21 shared tensors of /r/bridge.json, version 0\n",
        "attached to 21 shared tensors",
    ),
    (
        "13:50:02 INFO grpo_engine.train.trainee: training 21 of 21 parameters\n",
        "handing 21 parameters to inference",
    ),
    (
        "13:50:02 INFO grpo_engine.train.memory.rehearsal: rehearsing a step with the longest rows; the first one on a "
        "machine compiles its kernels\n",
        "rehearsing a step, kernels are compiled the first time",
    ),
    (
        "13:50:03 INFO grpo_engine.train.memory.rehearsal: the longest micro-batch fits: 1 x 2047 tokens, 62.1 GB at "
        "the peak\n",
        "a step fits, handing parameters to inference",
    ),
    (
        "13:50:03 WARNING grpo_engine.bridges.transport.server_client: POST http://127.0.0.1:9001/bridge/pause: "
        "[Errno 111] Connection refused; trying for 300 s\n",
        "waiting for a peer, 300 s at most",
    ),
)


def write(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text)


def followed(tmp_path: Path, phases: Sequence[tuple[str, str]] = (), *, offset: int = 0) -> tuple[Path, Progress]:
    log = tmp_path / "a.log"
    return log, Progress(log, offset, phases)


@pytest.mark.parametrize(
    ("phases", "start"),
    [(VLLM_PHASES, VLLM_ON_A_CPU), (VLLM_PHASES, VLLM_ON_GPUS), (TORCH_PHASES, TORCH), (TRAINER_PHASES, TRAINER)],
    ids=["vllm on a cpu", "vllm on gpus", "torch", "trainer"],
)
def test_every_phase_of_a_real_start_is_found(
    tmp_path: Path, phases: Sequence[tuple[str, str]], start: Sequence[tuple[str, str]]
) -> None:
    log, start_up = followed(tmp_path, phases)
    for text, words in start:
        write(log, text)
        assert start_up.look() == Movement(words)
        assert start_up.look() is None


def test_a_line_without_a_phase_is_progress_and_leaves_the_phase(tmp_path: Path) -> None:
    log, start_up = followed(tmp_path, VLLM_PHASES)
    assert start_up.look() is None
    write(log, "starting\n")
    assert start_up.look() == Movement(None)
    write(log, "Starting to load model m\nunheard of\n")
    assert start_up.look() == Movement("fetching the model")
    write(log, "unheard of\n")
    assert start_up.look() == Movement("fetching the model")


def test_lines_that_a_hanging_service_logs_are_no_progress(tmp_path: Path) -> None:
    log, start_up = followed(tmp_path)
    write(
        log,
        "(EngineCore pid=102) INFO 05-21 06:32:41 [shm_broadcast.py:698] No available shared memory broadcast block "
        "found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming "
        "work (e.g. compilation, weight/kv cache quantization).\n"
        'INFO:     127.0.0.1:55012 - "GET /health HTTP/1.1" 503 Service Unavailable\n\n',
    )
    assert start_up.look() is None
    write(log, "INFO 05-21 06:33:35 [monitor.py:81] Initial profiling\n")
    assert start_up.look() is not None


def test_earlier_attempts_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("Starting to load model m\n")
    log, start_up = followed(tmp_path, VLLM_PHASES, offset=25)
    assert start_up.look() is None
    write(log, "hello\n")
    assert start_up.look() == Movement(None)


def test_a_line_that_comes_in_pieces_is_read_whole(tmp_path: Path) -> None:
    log, start_up = followed(tmp_path, VLLM_PHASES)
    write(log, "Loading safetensors checkpoint ")
    assert start_up.look() == Movement(None)
    write(log, "shards:  50% Completed | 2/4 [00:01")
    assert start_up.look() == Movement("loading weights, 2 of 4 shards")


def test_of_much_the_end_is_read_and_a_log_made_smaller_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "MAX_PART_BYTES", 64)
    log, start_up = followed(tmp_path, VLLM_PHASES)
    write(log, "Loading pt checkpoint shards: | 1/4 \n" + "x\n" * 1000 + "Loading pt checkpoint shards: | 3/4 \n")
    assert start_up.look() == Movement("loading weights, 3 of 4 shards")
    log.write_text("Graph capturing finished\n")
    assert start_up.look() == Movement("CUDA graphs are captured")


def test_growing_gpu_memory_is_progress_and_shrinking_or_unknown_is_not(tmp_path: Path) -> None:
    _, start_up = followed(tmp_path)
    held = [None, 0, 5, 5, 3, None, 3, 4]
    assert [start_up.look(each) is not None for each in held] == [False, False, True, False, False, False, False, True]
