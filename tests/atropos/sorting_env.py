"""An environment as users of Atropos write them, made after its gsm8k_server.py: nothing of ours is in it.

It runs in the virtual environment of `atroposlib`, as `python sorting_env.py serve --config FILE.yaml`. Like its model
it has one server in `config_init`, whose address `serve` ignores.
"""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

NUM_DIGITS = 6


class SortingConfig(BaseEnvConfig):
    task: str = "sort"
    max_new_tokens: int = 8
    seed: int = 0


class SortingEnv(BaseEnv):
    name = "sorting"
    env_config_cls = SortingConfig

    @classmethod
    def config_init(cls):
        env_config = SortingConfig(
            tokenizer_name="NousResearch/DeepHermes-3-Llama-3-3B-Preview",
            group_size=8,
            use_wandb=True,
            total_steps=1000,
            batch_size=12,
            steps_per_eval=100,
            max_token_length=64,
            wandb_name="sorting",
        )
        server_config = APIServerConfig(
            model_name="NousResearch/DeepHermes-3-Llama-3-3B-Preview",
            base_url="http://localhost:9001/v1",
            api_key="x",
        )
        return env_config, server_config

    async def setup(self):
        self.random = random.Random(self.config.seed)
        self.iter = 0

    async def get_next_item(self):
        self.iter += 1
        return "".join(self.random.choice("0123456789") for _ in range(NUM_DIGITS))

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        answer = "".join(sorted(item)) if self.config.task == "sort" else item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            chat_completions = await managed.chat_completion(
                messages=[{"role": "user", "content": f"{self.config.task} {item}"}],
                n=self.config.group_size,
                max_tokens=self.config.max_new_tokens,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(chat_completions.choices, nodes, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(self.score(choice.message.content.strip(), answer))
        return group, []

    @staticmethod
    def score(given, answer):
        """The share of the digits that stand where they belong."""
        num_right = sum(a == b for a, b in zip(given, answer, strict=False))
        return num_right / max(len(given), len(answer))


if __name__ == "__main__":
    SortingEnv.cli()
