"""`grpo-engine server` for a checkout: `python -m example_trainer.vllm_api_server …`."""

from grpo_engine.aliases import vllm_api_server

if __name__ == "__main__":
    raise SystemExit(vllm_api_server())
