"""Ours beside stock vLLM on one GPU, in the same run: speed, weight updates, memory, ends, and whole training runs.

    python benchmarks/gpu.py --stages plain lora [--out FOLDER] [--model PATH|NAME] [--within 540]
    python benchmarks/gpu.py --stages stack --run smollm-gpu:shared_vllm:60 --run llama8b-random:lora_only:20
    python benchmarks/gpu.py --table FOLDER/gpu.jsonl …          the table of earlier runs, also of several

STAGES: model: create the model. plain: stock and ours with shared weights, alone and while a trainer is attached,
publishing, adapters merged into the weights, a checkpoint read in place, SIGTERM. lora: adapters in stock, in ours, and
in ours without CUDA graphs; swaps; SIGKILL of the process that serves. restart: `benchmarks/restart.py`. broadcast:
whole models sent from GPU 1 to a server on GPU 0, by ours and by stock's own transfer. turns: a server that sleeps and
is handed new weights, with nothing and with requests running. tensor_parallel: stock and ours with shared weights, each
over two GPUs, beside each other. stack: whole runs under `grpo-tui` (`_gpu_stack.py`). trl: whole steps of TRL's
colocated trainer (`_trl_colocate.py`), and their seconds over those of the colocated runs that `stack` has measured
into the same folder.

Every figure is printed at once as a line of JSON, also into FOLDER/gpu.jsonl; the table comes last. A stage that fails
says why and the next goes on; none leaves a process. Stock is `vllm.entrypoints.openai.api_server` with the flags that
ours gives vLLM. Speeds are medians of interleaved repeats: 32-token prompts that no cache contains, 256 new tokens.
`--device cpu --model local/tiny --new-tokens 8 --requests 1 4` rehearses all of it without a GPU (tensor_parallel with
VLLM_CPU_OMP_THREADS_BIND=nobind).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from _gpu_bench import PUBLISHES_UNDER_LOAD, Bench, Lanes, Trainer, bridge_file
from _gpu_servers import GENERATE, Failed, Fleet, Server, completions
from _gpu_stack import run_stack
from _gpu_table import print_table

from grpo_tui.supervisor.keeper import proc

HERE = Path(__file__).parent
STAGES = {
    "model": 150,
    "plain": 420,
    "lora": 300,
    "restart": 400,
    "broadcast": 420,
    "turns": 420,
    "tensor_parallel": 420,
    "stack": 540,
    "trl": 540,
}
"""Name → its limit in seconds."""
PUBLISHES, RELOADS, SWAPS = 20, 3, 10
ADAPTER = "adapter"
SHARE_OF_THREE = 0.28
"""Share of the GPU's memory for each of three servers, if a trainer with its own model runs beside them."""


def stock_lanes(stock: Server, healthy: list[Server]) -> Lanes:
    """Stock without log-probabilities, and with that of every sampled token, which `/generate` always gives."""
    if stock not in healthy:
        return {}
    return {"stock": (stock, completions("m")), "stock, logprobs": (stock, completions("m", logprobs=0))}


def plain(bench: Bench) -> None:
    """Weights without adapters, and adapters that are merged into them."""
    share = bench.options.gpu_memory_utilization
    idle_mb = bench.gpu.used_mb()
    stock = bench.measured(bench.stock("stock", share=share))
    ours = bench.ours("ours", "--shared-weights", "--bridge-file", str(bridge_file(bench)), share=share)
    healthy = bench.up([stock, ours])
    peers, routes = stock_lanes(stock, healthy), {"/generate": GENERATE, "/v1/completions": completions("m")}
    own = {name: (ours, route) for name, route in routes.items() if ours in healthy}
    with bench.part("speed alone"):
        bench.speeds(peers | {f"ours, {name}": lane for name, lane in own.items()})
    if ours not in healthy:
        return
    with bench.part("shared_vllm"):
        before_mb = bench.gpu.used_mb()
        with Trainer(bench, "shared_vllm", ours, bench.fleet.folder / "shared") as trainer:
            after_mb = bench.gpu.used_mb()
            extra_mb = None if before_mb is None or after_mb is None else round(after_mb - before_mb)
            bench.tell("sharing_extra_mb", "shared_vllm", extra_mb, **trainer.attached)
            again = {f"{name}, again": lane for name, lane in peers.items()}
            bench.speeds(again | {f"ours, {name}, trainer attached": lane for name, lane in own.items()})
            bench.publishes("shared_vllm, idle, nothing written", trainer, PUBLISHES, "nothing")
            bench.publishes_under_load("shared_vllm, 64 running, nothing written", ours, trainer, "nothing")
            if stock in healthy:
                bench.end(stock, signal.SIGTERM)  # the masters need its memory
            bench.tell("masters", "shared_vllm", **trainer.ask(do="masters"))
            bench.publishes("shared_vllm, idle, from fp32 masters", trainer, PUBLISHES, "masters")
            bench.publishes_under_load("shared_vllm, 64 running, from fp32 masters", ours, trainer, "masters")
    with bench.part("lora_merged"), Trainer(bench, "lora_merged", ours, bench.fleet.folder / "merged") as trainer:
        bench.tell("attach_s", "lora_merged", **trainer.attached)
        bench.publishes("lora_merged, idle", trainer, PUBLISHES, "masters")
        bench.publishes_under_load("lora_merged, 64 running", ours, trainer, "masters")
        bench.speeds({f"ours, {name}, lora_merged": lane for name, lane in own.items()})
    with bench.part("reload"):
        for version in range(RELOADS):
            _, took_ms = ours.ask("POST", "/bridge/reload", {"path": bench.model, "policy_version": 10_000 + version})
            bench.tell("reload_s", "ours", round(took_ms / 1e3, 2))
        bench.speeds({f"ours, {name}, reloaded": lane for name, lane in own.items()}, repeats=1)
    with bench.part("end"):
        bench.end(ours, signal.SIGTERM)
        bench.tell("gpu_before_and_after_mb", "plain", [idle_mb, bench.gpu.used_mb()])


def tensor_parallel(bench: Bench) -> None:
    """Servers over two GPUs each, without a trainer."""
    share, over_two = bench.options.gpu_memory_utilization, ("--tensor-parallel-size", "2")
    stock = bench.measured(bench.stock("stock", *over_two, share=share))
    shared = ("--shared-weights", "--bridge-file", str(bridge_file(bench)))
    ours = bench.ours("ours", *shared, *over_two, share=share)
    healthy = bench.up([stock, ours])
    own: Lanes = {"ours, /generate": (ours, GENERATE)} if ours in healthy else {}
    with bench.part("speed alone"):
        bench.speeds(stock_lanes(stock, healthy) | own)


def lora(bench: Bench) -> None:
    """Adapters beside the weights, in stock and in ours."""
    share = min(SHARE_OF_THREE, bench.options.gpu_memory_utilization)
    idle_mb = bench.gpu.used_mb()
    ranks = ["--enable-lora", "--max-lora-rank", "16"]
    stock = bench.measured(bench.stock("stock lora", *ranks, "--max-loras", "2", "--max-cpu-loras", "4", share=share))
    ours = bench.measured(bench.ours("ours lora", *ranks, share=share))
    eager = bench.ours("ours lora eager", *ranks, "--enforce-eager", share=share)
    healthy = bench.up([stock, ours, eager])
    kept = bench.fleet.folder / "kept"
    if ours in healthy:
        memory = Path("/dev/shm") / f"grpo-bench-{os.getpid()}"
        with bench.part("lora_only"), Trainer(bench, "lora_only", ours, memory) as trainer:
            bench.tell("attach_s", "lora_only", **trainer.attached)
            bench.publishes("lora_only, idle", trainer, PUBLISHES, "masters")
            bench.publishes_under_load("lora_only, 64 running", ours, trainer, "masters")
            trainer.ask(do="save", folder=str(kept))
        shutil.rmtree(memory, ignore_errors=True)
    lanes: Lanes = {}
    if stock in healthy:
        with bench.part("stock's swaps"):
            times = [
                stock.ask("POST", "/v1/load_lora_adapter", {"lora_name": f"{ADAPTER}{i}", "lora_path": str(kept)})[1]
                for i in range(SWAPS)
            ]
            bench.tell("swap_ms", "stock lora", round(statistics.median(times), 1), max=round(max(times), 1))
            lanes["stock lora, logprobs"] = (stock, completions(f"{ADAPTER}{SWAPS - 1}", logprobs=0))
    for server in (ours, eager):
        if server in healthy:
            with bench.part(f"swaps of {server.name}"):
                times = [
                    server.ask("POST", "/lora/load", {"adapter_path": str(kept), "adapter_name": f"{ADAPTER}@{i}"})[1]
                    for i in range(SWAPS)
                ]
                bench.tell("swap_ms", server.name, round(statistics.median(times), 1), max=round(max(times), 1))
                lanes[f"{server.name}, /generate"] = (server, GENERATE)
    slow = {name: lane for name, lane in lanes.items() if lane[0] is eager}
    with bench.part("speed with adapters"):
        bench.speeds({name: lane for name, lane in lanes.items() if name not in slow})
    with bench.part("speed without graphs"):
        bench.speeds(slow, num_new=max(1, bench.options.new_tokens // 4))
    with bench.part("ends"):
        for server in healthy:
            bench.end(server, signal.SIGTERM if server is eager else signal.SIGKILL)
        bench.tell("gpu_before_and_after_mb", "lora", [idle_mb, bench.gpu.used_mb()])


def broadcast(bench: Bench) -> None:
    """Whole models sent from the second GPU to a server on the first, by ours and by stock's own transfer."""
    share, where = min(0.4, bench.options.gpu_memory_utilization), {"CUDA_VISIBLE_DEVICES": "0"}
    stock = bench.measured(
        bench.stock(
            "stock", "--weight-transfer-config", '{"backend": "nccl"}', share=share, VLLM_SERVER_DEV_MODE="1", **where
        )
    )
    ours = bench.ours("ours", "--receives-weights", share=share, **where)
    healthy = bench.up([stock, ours])
    sides = {"broadcast": (ours, GENERATE), "stock-nccl": (stock, completions("m", logprobs=0))}
    for mode, (server, route) in sides.items():
        if server not in healthy:
            continue
        folder = bench.fleet.folder / mode
        with bench.part(mode), Trainer(bench, mode, server, folder, CUDA_VISIBLE_DEVICES="1") as trainer:
            bench.tell("attach_s", mode, **trainer.attached)
            bench.publishes(f"{mode}, idle", trainer, PUBLISHES, "nothing")
            bench.publishes_under_load(f"{mode}, 64 running", server, trainer, "nothing", route)


def turns(bench: Bench) -> None:
    """A server that sleeps during steps of a trainer on its GPU, and is handed the new weights when it wakes."""
    share, idle_mb = bench.options.gpu_memory_utilization, bench.gpu.used_mb()
    folder = bench.fleet.folder / "turns"
    flags = ["--enable-sleep-mode", "--handover", str(folder / "handover")]
    ours = bench.ours("ours", *flags, share=share)
    if not bench.up([ours]):
        return
    lane: Lanes = {"ours, /generate": (ours, GENERATE)}
    with bench.part("speed before it slept"):
        bench.speeds(lane)
    with bench.part("turns"), Trainer(bench, "turns", ours, folder) as trainer:
        bench.tell("attach_s", "turns", **trainer.attached)
        bench.turns("turns, nothing running", trainer, PUBLISHES)
        with bench.part("speed after it slept"):
            bench.speeds({f"{name}, woken": each for name, each in lane.items()})
        loaded = "turns, 64 running"
        with bench.part(loaded), bench.under_load(loaded, ours):
            bench.turns(loaded, trainer, PUBLISHES_UNDER_LOAD)
    with bench.part("end"):
        bench.end(ours, signal.SIGTERM)
        bench.tell("gpu_before_and_after_mb", "turns", [idle_mb, bench.gpu.used_mb()])


def restart(bench: Bench) -> None:
    """Run `restart.py` with the flags of `--restart-flag`."""
    script = HERE / "restart.py"
    if not script.exists():
        raise Failed(f"{script} is not there")
    _, environment = bench.fleet.marked("restart")
    subprocess.run([sys.executable, str(script), *bench.options.restart_flag], env=environment, check=True)


def stack(bench: Bench) -> None:
    """Whole runs."""
    for number, spec in enumerate(bench.options.run):
        with bench.part(spec):
            run_stack(spec, number, bench)


def trl(bench: Bench) -> None:
    """TRL's colocated trainer; the ratio holds where `--trl-rows` is what a GPU of the runs has in a step."""
    options = bench.options
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    argv += ["--nproc-per-node", str(options.trl_processes), str(HERE / "_trl_colocate.py")]
    argv += ["--model", bench.model, "--steps", str(options.trl_steps), "--device", options.device]
    argv += ["--rows", str(options.trl_rows)]
    path = bench.fleet.folder / "trl.log"
    with path.open("wb") as log:
        done = subprocess.run(argv, env=bench.fleet.environment, stdout=subprocess.PIPE, stderr=log, text=True)
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    theirs = min(printed, key=lambda each: "failed" not in each, default={})  # the first failure, if there is one
    bench.tell("trl", "TRL, colocated", theirs or f"exit code {done.returncode}: {last_error(path)}")
    measured = (json.loads(line) for line in (options.out / "gpu.jsonl").read_text().splitlines() if line)
    for run in (each for each in measured if each["figure"] == "run" and "colocate" in each["who"]):
        if theirs.get("s_a_step") and run["value"].get("s_a_step"):
            bench.tell("trl_over_ours", run["who"], round(theirs["s_a_step"] / run["value"]["s_a_step"], 2))


def last_error(log: Path) -> str:
    """What the log of a launcher says of the rank that failed first: the others got its SIGTERM."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    reasons = [line for line in lines if re.search(r"Error: .|Signal (?!15\b)", line)]
    return reasons[-1] if reasons else "no error in its log"


# --- the outer process --------------------------------------------------------------------------------------------


def inner(stage: str, options: argparse.Namespace) -> None:
    """One stage, in this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    folder = Path(tempfile.mkdtemp(prefix=f"gpu-{stage}-"))
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1"} | ({"VLLM_CPU_KVCACHE_SPACE": "1"} if options.device == "cpu" else {})
    began = time.monotonic()
    model = options.model
    if stage != "stack":  # its profiles name their models
        lines = subprocess.run(
            [sys.executable, "-c", "from grpo_engine.models.loading import resolve_model as r\n"
                                   f"print(r({options.model!r}))"],
            env=environment, check=True, stdout=subprocess.PIPE, text=True,
        ).stdout.splitlines()  # fmt: skip
        model = lines[-1]
    config = Path(model) / "config.json"
    vocabulary = json.loads(config.read_text())["vocab_size"] if config.is_file() else 32_000
    try:
        with Fleet(folder=folder, environment=environment, within_s=options.start_limit) as fleet:
            bench = Bench(stage=stage, options=options, model=model, vocabulary=vocabulary, fleet=fleet)
            if stage == "model":
                bench.tell("made_in_s", options.model, round(time.monotonic() - began, 1), folder=model)
            else:
                stages = (plain, lora, restart, broadcast, turns, tensor_parallel, stack, trl)
                next(each for each in stages if each.__name__ == stage)(bench)
            bench.tell("took", f"stage {stage}", round(time.monotonic() - began, 1), unit="s")
    finally:
        keep_logs(folder, options.out, stage)


def keep_logs(folder: Path, out: Path, stage: str) -> None:
    """Write the last part of all logs into one file."""
    with open(out / f"{stage}.log", "a") as file:
        for log in sorted(folder.glob("**/*.log")):
            file.write(f"\n===== {log.name}\n{log.read_text(errors='replace')[-40_000:]}")
    shutil.rmtree(folder, ignore_errors=True)


def run_stage(stage: str, limit_s: float, out: Path) -> None:
    """Run a stage as a process, which is ended with everything it started at its limit."""
    mark = f"bench-stage-{os.getpid()}-{stage}"
    with (out / "gpu.jsonl").open("a") as file:

        def tell(line: str) -> None:
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        tell(json.dumps({"stage": stage, "figure": "began", "who": stage, "limit_s": round(limit_s)}))
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--inner", stage, "--out", str(out)],
            env={**os.environ, "GRPO_BENCH_STAGE": mark, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        over = threading.Timer(limit_s, process.terminate)
        over.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tell(line.rstrip())
            process.wait(30)
        finally:
            is_late = not over.is_alive()
            over.cancel()
            end_all(mark)
        if process.returncode:
            why = f"ended by its limit of {limit_s:.0f} s" if is_late else f"exit code {process.returncode}"
            tell(json.dumps({"stage": stage, "figure": "failed", "who": f"stage {stage}", "reason": why}))


def end_all(mark: str) -> None:
    """Kill processes that still have a stage's marker."""
    spared = proc.ourselves()
    for each in proc.living():
        try:
            environment = Path(f"/proc/{each.pid}/environ").read_bytes()
        except OSError:
            continue
        if each.pid not in spared and f"GRPO_BENCH_STAGE={mark}".encode() in environment:
            proc.send_signal(each, signal.SIGKILL)


def flags() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["model", "plain", "lora", "restart"])
    parser.add_argument("--inner", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--table", nargs="+", type=Path, help="files of earlier runs: print their table, run nothing")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-figures")))
    parser.add_argument("--within", type=float, default=540.0, help="seconds for all stages together")
    parser.add_argument("--start-limit", type=float, default=200.0, help="seconds for the start of a server")
    parser.add_argument("--model", default="local/llama-8b-random")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.45)
    parser.add_argument("--logprobs-mode", default="raw", help="of ours; stock has raw")
    parser.add_argument("--server-flag", action="append", default=[], help="another flag for our server")
    parser.add_argument("--restart-flag", action="append", default=[], help="another flag for restart.py")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--run", action="append", default=[], help="PROFILE[:MODE]:STEPS[:finished][+KEY=VALUE…] for stack; repeat"
    )
    parser.add_argument("--run-limit", type=float, default=240.0, help="seconds for one of them")
    parser.add_argument("--run-set", action="append", default=[], help="KEY=VALUE, for all of them")
    parser.add_argument(
        "--restart-at",
        type=int,
        nargs="+",
        default=[],
        help="restart vLLM in each of them, after so many steps each time",
    )
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="SERVICE[+]@STEP",
        help="SIGKILL, after so many steps of each; + for what it has forked; repeat",
    )
    parser.add_argument("--down-limit", type=float, help="seconds that services get to end; default: their own")
    parser.add_argument("--trl-processes", type=int, default=1, help="one a GPU")
    parser.add_argument("--trl-steps", type=int, default=20)
    parser.add_argument("--trl-rows", type=int, default=16, help="sequences of a GPU and step")
    parser.add_argument("--record", type=int, help="the run of this number (0 is the first) is recorded")
    return parser


def main() -> None:
    options = flags().parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if options.table:
        print_table([line for path in options.table for line in path.read_text().splitlines()])
        return
    if options.inner:
        inner(options.inner, options)
        return
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.within
    for stage in options.stages:
        limit_s = min(STAGES[stage], until - time.monotonic())
        if limit_s > 10:
            run_stage(stage, limit_s, options.out)
        else:
            print(json.dumps({"stage": stage, "figure": "failed", "who": f"stage {stage}", "reason": "no time left"}))
    print_table((options.out / "gpu.jsonl").read_text().splitlines())


if __name__ == "__main__":
    main()
